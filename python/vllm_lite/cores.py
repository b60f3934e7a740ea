"""The processor cores that this process may use."""

import os

_SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


def cores() -> list[int]:
    """A CPU of each core that this process's affinity has.

    Threads beside each other on one core share its vector units, so that a second one there does
    nothing for the kernels.
    """
    first: dict[str, int] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        try:
            with open(_SIBLINGS.format(cpu)) as file:
                core = file.read()
        except OSError:
            core = str(cpu)
        first.setdefault(core, cpu)
    return list(first.values())


def num_available_cores() -> int:
    """Of the affinity, or fewer: as many as the control group's limit lets run at once."""
    count = len(cores())
    try:
        with open("/sys/fs/cgroup/cpu.max") as file:
            quota, period = file.read().split()
    except (OSError, ValueError):
        return count
    return count if quota == "max" else max(1, min(count, round(int(quota) / int(period))))
