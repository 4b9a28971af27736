import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports a kernel

# Two test workers share two cores; tiny models gain nothing from more threads.
torch.set_num_threads(int(os.environ.get("FOCUS_TEST_THREADS", "1")))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
