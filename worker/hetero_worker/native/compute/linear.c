/* y = x · Wᵀ + bias: which kernel multiplies with a format. */
#include "amx.h"
#include "linear.h"

extern hc_kernel HC_NAME(linear), HC_NAME(linear_tiles), HC_NAME(linear_int_tiles), HC_BASE_NAME(linear_floats), HC_BASE_NAME(linear_ints);

void HC_NAME(linear)(const hc_op *any, hc_crew *crew, uint64_t member) {
    const hc_linear_op *op = (const hc_linear_op *)any;
    const hc_weight *weight = op->weight;
    if (!any->rows)
        return;
#if defined(HC_HAS_TILES)
    if (weight->format == HC_BF16 && weight->in) {
        HC_NAME(linear_tiles)(any, crew, member);
        return;
    }
    if (hc_takes_int_tiles(op) && weight->in) {
        HC_NAME(linear_int_tiles)(any, crew, member);
        return;
    }
#endif
    if (hc_is_quantized(weight) && weight->in)
        HC_BASE_NAME(linear_ints)(any, crew, member);
    else /* a weight without inputs has no numbers that could be whole */
        HC_BASE_NAME(linear_floats)(any, crew, member);
}
