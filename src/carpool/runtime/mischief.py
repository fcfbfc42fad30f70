"""What a client of a GPU can do to its neighbours, on purpose: for the faults that tests and benchmarks ask for."""

from __future__ import annotations

import ctypes
import os
import signal
import time

import torch

_BUSY_CYCLES = 4_000_000_000  # two seconds of one kernel, at 2 GHz
_UNDER_WAY_S = 0.05
_NOWHERE = 0x10  # no process has memory there
# A kernel that writes to the address it is given.
_POKE = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry poke(.param .u64 place)
{
    .reg .u64 %address;
    .reg .u32 %value;
    ld.param.u64 %address, [place];
    mov.u32 %value, 1;
    st.global.u32 [%address], %value;
    ret;
}
"""


def die_in_a_kernel() -> None:
    """Be killed while a kernel of ours runs."""
    torch.cuda._sleep(_BUSY_CYCLES)  # type: ignore[no-untyped-call]
    time.sleep(_UNDER_WAY_S)
    os.kill(os.getpid(), signal.SIGKILL)


def write_nowhere() -> None:
    """Write to memory that is not there; the next word with the GPU brings the error."""
    driver = ctypes.CDLL("libcuda.so.1")
    torch.cuda.synchronize()
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    place = ctypes.c_uint64(_NOWHERE)
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(place))
    for answer in (
        driver.cuModuleLoadData(ctypes.byref(module), _POKE),
        driver.cuModuleGetFunction(ctypes.byref(function), module, b"poke"),
        driver.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, None, arguments, None),
    ):
        if answer != 0:
            raise AssertionError(f"the driver would not make the fault: error {answer}")
    torch.cuda.synchronize()
