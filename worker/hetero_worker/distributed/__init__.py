"""Everything that ranks exchange: rounds, links, and the groups that carry them.

    exchange         interfaces, and the exchange of one rank     coordinator      makes an epoch's groups, times them
    routes           subgroups and links that a plan needs        rendezvous       how ranks meet and agree
    native_ends      waits, rounds and links in native code       groups           host exchanges and device groups
    shm_exchange     rounds through shared memory                 device_group     collectives among GPU ranks
    shm_links        links through shared memory                  hierarchical     groups of GPU ranks and CPU ranks
    shm_rank         aborts and lost peers in shared memory       staging          copies and links of a device
    shm_segment      layout of the shared memory                  gloo_exchange    any network; the reference
    native_exchange  the library in C, and its loader             tcp              rounds and links over TCP

Models, samplers and runners need only `exchange` and `routes`.
"""
