"""Shared memory that a GPU copies to and from by itself, because its pages are registered with the driver.

Copies of pages that are not go through a buffer of the driver's, by the processor, at a fraction of the link's speed.
Registering takes about as long as a few such copies, so it is for memory that is used again and again.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor


def pin(memory: Tensor, owner: object) -> bool:
    """Register a tensor's pages as long as ``owner`` lives, which must keep them mapped; whether that worked.

    Without it copies are slower and nothing else is different, so a refusal (pages that may not be locked) is no error.
    """
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) != 0:
        return False
    release = weakref.finalize(owner, runtime.cudaHostUnregister, memory.data_ptr())
    release.atexit = False  # the process takes its pages along, and the driver may be gone by then
    return True
