"""The rank's process: from its command line to its exit code.

    rank            entry: configuration, cores, torch, in that order
    forkserver      process that has torch imported and forks ranks
    config          command line and environment
    reconnect       a rank outlives its gateway and dials the next
    state_machine   from Hello to the stream's end, on the main thread
    step_loop       plans, from their arrival to their answers
    messages        the rank's Hello and identity; conversion between messages and the rank's own types
    gateway_link    the one stream to the gateway, on threads of its own
    epoch_fence     delivery of an Abort to a main thread that is blocked
    tuning_cache    measurements of machine and kernels, kept for the rank's successor

Nothing here is imported before `rank` has bound the process to its cores, except `config` and `reconnect`.
"""
