"""Two processes learn what one does: DDP, and a base whose layers are spread over both."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from training_runs import MOVED_CENTROIDS, assert_same, parallel_recipe, routers, run_on_answers

from focus_attn.training.checkpoint import BASE, checkpoints

CLOSE = {"atol": 1e-5, "rtol": 0.0}


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    output = tmp_path_factory.mktemp("two")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(port)]
    program = [str(Path(__file__).with_name("training_runs.py")), str(output)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run([*launcher, *program], env=environment, capture_output=True, text=True, timeout=500)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return output


@pytest.mark.parametrize("trains", ["routers", "everything"])
def test_two_processes_learn_what_one_does(trains, two_processes, tmp_path):
    alone = run_on_answers(tmp_path, parallel_recipe(trains))
    base = {name: p.detach() for name, p in alone.model.base_model.named_parameters() if "focus" not in name}
    for sharding in ("none", "fsdp"):
        folder = two_processes / f"{trains}-{sharding}"
        mine, theirs = (load_file(one / "focus_model.safetensors") for one in (tmp_path, folder))
        assert_same(mine, theirs, **CLOSE)
        last = checkpoints(folder)[-1]
        assert last.position.total == 3
        if trains == "everything":
            assert_same(base, load_file(last.folder / BASE), **CLOSE)


@pytest.mark.parametrize("moved", MOVED_CENTROIDS, ids=lambda moved: next(iter(moved)))
def test_centroids_move_by_what_both_processes_saw(moved, two_processes, tmp_path):
    run_on_answers(tmp_path, parallel_recipe("everything", bias_rate=0.0, **moved))
    mine, theirs = (load_file(one / "focus_model.safetensors") for one in (tmp_path, two_processes / next(iter(moved))))
    assert_same(mine, theirs, **CLOSE)


@pytest.mark.parametrize("trains", ["routers", "everything"])
def test_one_process_goes_on_from_what_two_left(trains, two_processes, tmp_path):
    """Optimiser and weights are saved whole, however many processes they were spread over."""
    folder = two_processes / f"{trains}-fsdp"
    last = checkpoints(folder)[-1].folder
    before = checkpoints(folder)[0]
    assert before.position.total == 2
    for file in last.iterdir():
        file.unlink()
    last.rmdir()
    resumed = run_on_answers(folder, parallel_recipe(trains))
    alone = run_on_answers(tmp_path, parallel_recipe(trains))
    assert_same(routers(resumed), routers(alone), **CLOSE)
