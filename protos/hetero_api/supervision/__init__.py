"""Child processes of the launcher and of a rank pod: started or forked, watched, restarted and stopped in time.

    child           one process: its end, its heartbeat, its output
    supervisor      all children of one supervising process
    forkserver      the warm process that ranks are forked from, seen from its supervisor
    service         a process that has to run, and when it is started again
    warden          program that outlives a killed supervisor and ends its children

What to do about a child that ended is the caller's policy: the launcher has a budget for the whole group, a pod gives a
rank up and leaves the container to Kubernetes.
"""
