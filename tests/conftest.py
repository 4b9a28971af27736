import os
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports a kernel

# Two test workers share two cores; tiny models gain nothing from more threads.
torch.set_num_threads(int(os.environ.get("FOCUS_TEST_THREADS", "1")))


WITH_MKLDNN = torch.backends.mkldnn.enabled


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    # PyTorch turns it off for good when it meets bf16 on a CPU without: fp32 would then round otherwise than before.
    torch.backends.mkldnn.set_flags(WITH_MKLDNN)
