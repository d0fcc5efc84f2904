"""Tensors that lie in mapped files, as `from_pretrained` gives them: read, and not kept in memory.

A page of a mapped file that was read stays among the process's pages until it is unmapped, and
safetensors unmaps a file with the last of its tensors. So pages are given back as they are read.
"""

from __future__ import annotations

import ctypes
import mmap
import os

import numpy as np
import torch

# An entry of pagemap (Linux, Documentation/admin-guide/mm/pagemap.rst): the page is in memory, and
# it is of a file or shared. A page of a private mapping that was written to is neither.
_PRESENT, _OF_A_FILE = np.uint64(1 << 63), np.uint64(1 << 61)
_MADV_DONTNEED = 4


def let_go(tensor: torch.Tensor) -> None:
    """Gives back the pages under a tensor on the CPU that a file or shared memory still holds: they
    are read again when they are asked for. What was written to stays, and so does all memory where
    the system does not tell its pages.
    """
    if tensor.device.type != "cpu" or not tensor.numel():
        return
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr() // mmap.PAGESIZE
    stop = -(-(tensor.data_ptr() + (last + 1) * tensor.element_size()) // mmap.PAGESIZE)
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as file:
            told = os.pread(file.fileno(), 8 * (stop - start), 8 * start)
    except OSError:
        return
    pages = np.frombuffer(told, np.uint64)
    is_clean = (pages & _PRESENT != 0) & (pages & _OF_A_FILE != 0)
    edges = np.flatnonzero(np.diff(is_clean, prepend=False, append=False))
    library = ctypes.CDLL(None)
    for first, end in edges.reshape(-1, 2).tolist():
        address, size = (start + first) * mmap.PAGESIZE, (end - first) * mmap.PAGESIZE
        library.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), _MADV_DONTNEED)
