"""The status of a resource: causes from pods, nodes and the gateway's answer, and conditions made of them.

Everything here is a function of one observation. A report does not change while nothing changed: messages hold no
addresses, times or counts that rise by themselves, because a status that differs is a write.

    reasons      every reason, what it means, and troubles
    text         bounded, steady text
    containers   why a container is not ready, and how it ended
    pods         which pods hold which ranks, why one is not ready, and which nodes answer
    situation    one look, put in order; whether the group serves, and each rank
    causes       what blocks the group, the first cause first
    findings     the conditions but Progressing
    progress     Progressing, and when to look again
    figures      counts, places, speeds
    whole        several replicas together
"""
