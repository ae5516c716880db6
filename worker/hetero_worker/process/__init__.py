"""The rank's process: from its command line to its exit code.

rank            entry: configuration, cores, torch, in that order
forkserver      process that has torch imported and forks ranks
config          command line and environment
identity        the rank's Hello and what it keeps over its epochs
reconnect       a rank outlives its gateway and dials the next
state_machine   from Hello to the stream's end, on the main thread
messages        conversion between protobuf messages and the rank's own types
gateway_link    the one stream to the gateway, on threads of its own
epoch_fence     Abort for a main thread that is blocked
"""
