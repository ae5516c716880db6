"""This machine, for programs that start others on it: the launcher, and the supervisor in a rank pod.

cores         which cores each rank gets           death_signal   children that end with their parent
memory        how much memory there is             stop_signals   signals to look at and to wait for
"""
