/* The table of one instruction set's kernels; compiled with its flags, as the kernels are, and HC_ISA its name. */
#include "isa.h"

extern hc_kernel hc_pack; /* compiled once: it moves, and computes nothing */
extern hc_kernel HC_NAME(linear), HC_BASE_NAME(embed), HC_BASE_NAME(norm), HC_NAME(gated), HC_BASE_NAME(squares), HC_NAME(latent),
    HC_NAME(heads), HC_BASE_NAME(delta), HC_BASE_NAME(open), HC_BASE_NAME(products), HC_BASE_NAME(rotate),
    HC_NAME(attend), HC_NAME(attend_span), HC_BASE_NAME(add), HC_BASE_NAME(pick), HC_BASE_NAME(choose), HC_BASE_NAME(step_on),
    HC_BASE_NAME(route), HC_NAME(experts), HC_BASE_NAME(low_rank);
extern int HC_NAME(hc_supports)(void);

const hc_isa_table HC_NAME(hc_table) = {
    .name = HC_TEXT(HC_ISA),
    .is_supported = HC_NAME(hc_supports),
    .kernels =
        {
            [HC_PACK] = hc_pack,
            [HC_LINEAR] = HC_NAME(linear),
            [HC_EMBED] = HC_BASE_NAME(embed),
            [HC_NORM] = HC_BASE_NAME(norm),
            [HC_GATED] = HC_NAME(gated),
            [HC_SQUARES] = HC_BASE_NAME(squares),
            [HC_LATENT] = HC_NAME(latent),
            [HC_HEADS] = HC_NAME(heads),
            [HC_DELTA] = HC_BASE_NAME(delta),
            [HC_OPEN] = HC_BASE_NAME(open),
            [HC_PRODUCTS] = HC_BASE_NAME(products),
            [HC_ROTATE] = HC_BASE_NAME(rotate),
            [HC_ATTEND] = HC_NAME(attend),
            [HC_ATTEND_SPAN] = HC_NAME(attend_span),
            [HC_ADD] = HC_BASE_NAME(add),
            [HC_PICK] = HC_BASE_NAME(pick),
            [HC_CHOOSE] = HC_BASE_NAME(choose),
            [HC_STEP_ON] = HC_BASE_NAME(step_on),
            [HC_ROUTE] = HC_BASE_NAME(route),
            [HC_EXPERTS] = HC_NAME(experts),
            [HC_LOW_RANK] = HC_BASE_NAME(low_rank),
        },
};
