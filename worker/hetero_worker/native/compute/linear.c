/* y = x · Wᵀ + bias: which kernel multiplies with a format. */
#include "amx.h"
#include "packing.h"

extern hc_kernel HC_NAME(linear), HC_NAME(linear_tiles), HC_BASE_NAME(linear_floats), HC_BASE_NAME(linear_ints);

void HC_NAME(linear)(const hc_op *any, hc_crew *crew, uint64_t member) {
    const hc_weight *weight = ((const hc_linear_op *)any)->weight;
    if (!any->rows)
        return;
    if (hc_is_quantized(weight) && weight->in)
        HC_BASE_NAME(linear_ints)(any, crew, member);
#if defined(HC_HAS_TILES)
    else if (weight->format == HC_BF16 && weight->in)
        HC_NAME(linear_tiles)(any, crew, member);
#endif
    else /* a weight without inputs has no numbers that could be whole */
        HC_BASE_NAME(linear_floats)(any, crew, member);
}
