"""This machine, for programs that start others on it: the launcher, and the supervisor in a rank pod.

cores         which cores each rank gets           death_signal   children that end with their parent
memory        how much memory there is             stop_signals   signals to look at and to wait for
cgroup        limits of CPU time and memory        topology       CPUs, physical cores and NUMA nodes
file_lock     locks that end with their holder   heartbeat      what a rank is at, and whether it is frozen
restarts      how long to wait before the next start, and how many starts there may be
"""
