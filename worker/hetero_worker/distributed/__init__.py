"""Everything that ranks exchange: rounds, links, and the groups that carry them.

    exchange         interfaces, and the exchange of one rank     coordinator      makes all groups of an epoch
    routes           subgroups and links that a plan needs        rendezvous       how ranks meet and agree
    shm_exchange     rounds through shared memory                 groups           host exchanges and device groups
    shm_links        links through shared memory                  measuring        what ranks measure together
    shm_rank         waits, aborts and lost peers                 device_group     collectives among GPU ranks
    shm_segment      layout of the shared memory                  hierarchical     groups of GPU ranks and CPU ranks
    native_exchange  the library in C, and its loader             staging          copies and links of a device
    gloo_exchange    any network; the reference

Models, samplers and runners need only `exchange` and `routes`.
"""
