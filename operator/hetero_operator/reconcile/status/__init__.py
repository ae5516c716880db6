"""What is told about a resource: causes read from pods, nodes and the gateway's own word, and conditions made of them.

Everything here is a function of what was observed in one look. What is told does not change while nothing changed: no
addresses, times or counts that rise by themselves stand in a message, for a status that differs is a write.

    reasons      every reason, and what it means
    text         bounded, steady text
    exits        how a container ended, in words
    containers   what keeps a container from being ready
    pods         what keeps a pod from being ready
    nodes        which nodes answer
    expected     which pods hold which ranks
    situation    one look, put in order
    serving      whether the group serves, and each rank
    causes       what blocks the group, the first cause first
    findings     the conditions but Progressing; numa: NUMAPinned; progress: Progressing
    history      times of transitions, kept from the last report
    figures      counts, places, speeds
    transitions  Events
    timing       when to look again
"""
