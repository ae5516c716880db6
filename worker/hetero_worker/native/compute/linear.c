/* y = x · Wᵀ + bias: which kernel multiplies with a format. */
#include "isa.h"
#include "packing.h"

extern hc_kernel HC_NAME(linear), HC_NAME(linear_floats), HC_NAME(linear_ints);

void HC_NAME(linear)(const hc_op *any, hc_crew *crew, uint64_t member) {
    const hc_weight *weight = ((const hc_linear_op *)any)->weight;
    if (!any->rows)
        return;
    if (hc_is_quantized(weight) && weight->in)
        HC_NAME(linear_ints)(any, crew, member);
    else /* a weight without inputs has no numbers that could be whole */
        HC_NAME(linear_floats)(any, crew, member);
}
