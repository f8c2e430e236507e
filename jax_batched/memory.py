"""What a process does with memory that it frees."""

import ctypes


def keep_freed_memory() -> bool:
    """Makes the C library keep the memory that this process frees, for arrays to come.

    On a CPU every large array is fresh memory: the system maps it, page by page, as it is first
    written, and takes it back when the array dies. Where arrays of one size come and go, that takes
    longer than an operation of this library. After this call the C library keeps what is freed, in
    one heap for all threads.

    The price: the process never gives memory back to the system, so its size stays at its peak,
    and threads that allocate at the same time wait for each other. Opt-in for that reason, for the
    whole process, and not to be undone. Call it first, before arrays are made.

    Returns:
      Whether the C library took the settings; False where it is not glibc.
    """
    m_trim_threshold, m_mmap_max, m_arena_max = -1, -4, -8  # from glibc's malloc.h
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((m_mmap_max, 0), (m_trim_threshold, 2**31 - 1), (m_arena_max, 1))
    return all([mallopt(*setting) == 1 for setting in settings])
