"""Memory that ends right before an inaccessible page: code that reads or writes beyond it ends the
process with SIGSEGV.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref

import numpy as np

ALIGNMENT = 64  # of this memory, as of every buffer that a kernel sees
_PAGE = mmap.PAGESIZE
_NO_ACCESS = 0  # PROT_NONE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def before_fence(nbytes: int, alignment: int = ALIGNMENT) -> np.ndarray:
    """``nbytes`` zero bytes that begin at a multiple of ``alignment``, a power of two. Less than
    ``alignment`` bytes lie between their end and the inaccessible page, and none if ``nbytes`` is a
    multiple of it. The memory lives as long as any view of it.
    """
    room = -(-nbytes // alignment) * alignment
    pages = -(-room // _PAGE) * _PAGE
    size = pages + _PAGE
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    start = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, private, -1, 0)
    if start in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "mmap")
    if _libc.mprotect(start + pages, _PAGE, _NO_ACCESS):
        raise OSError(ctypes.get_errno(), "mprotect")
    block = (ctypes.c_uint8 * nbytes).from_address(start + pages - room)
    weakref.finalize(block, _libc.munmap, start, size)
    return np.frombuffer(block, np.uint8) if nbytes else np.empty(0, np.uint8)


def fenced(array: np.ndarray, alignment: int = ALIGNMENT) -> np.ndarray:
    """A dense copy of the array in such memory."""
    copy = before_fence(array.nbytes, alignment)
    if not array.nbytes:
        return array
    copy[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return copy.view(array.dtype).reshape(array.shape)
