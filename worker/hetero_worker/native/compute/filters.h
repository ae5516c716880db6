/* Which columns of a row top_k, top_p and min_p leave: a head of the one order, which is by value, of equals the first column
 * first. What lies ahead of a place is counted and weighed. Weights are whole numbers, so that they add up to the same in
 * whatever order and however many members share a row.
 *
 * Few columns are looked at: strips of a row have their largest kept, and as many of these as are wanted bound from below
 * what can be among that many best. What is above lies in a list. Where the filters leave more than that, it is the whole row
 * that is counted and weighed. Whoever includes it rounds products before they are added (build.py, _ROUNDED). */
#ifndef HETERO_FILTERS_H
#define HETERO_FILTERS_H

#include "choosing.h"
#include "exponential.h"

#define HC_PART 20           /* bits of each half of a weight: the largest one's is 2^40 */
#define HC_CHUNK (512 * HC_W) /* columns whose halves are added up in 32 bits */

/* A place in the order: that column of the value, and all that come before. */
typedef struct {
    float value;
    int32_t column;
} hc_place;

static const hc_place hc_all_places = {-INFINITY, INT32_MAX};

/* Values, all of a row or some of it, each divided by the temperature. */
typedef struct {
    const float *x;
    const int32_t *columns; /* NULL: as they come */
    uint64_t count;
    float temperature;
    float largest; /* of the row */
} hc_view;

typedef struct {
    uint64_t count, weight;
} hc_amount;

/* What is at a place of the order or before it; weights only if they are asked for. */
static hc_amount hc_measure(const hc_view *view, hc_place last, int with_weight) {
    hc_amount amount = {0, 0};
    vi lanes;
    for (int lane = 0; lane < HC_W; lane++)
        lanes[lane] = lane;
    for (uint64_t begin = 0; begin < view->count; begin += HC_CHUNK) {
        uint64_t end = view->count - begin < HC_CHUNK ? view->count : begin + HC_CHUNK;
        vi counts = v_all_of(0), high = v_all_of(0), low = v_all_of(0);
        for (uint64_t i = begin; i < end; i += HC_W) {
            vf value = v_load_up_to(view->x + i, end - i) / view->temperature;
            vi columns = lanes + (int32_t)i, is_in = value > last.value;
            vi is_one = lanes < (int32_t)(end - i < HC_W ? end - i : HC_W);
            if (view->columns)
                memcpy(&columns, view->columns + i, sizeof columns); /* lists end behind whole vectors */
            is_in = is_one & (is_in | ((value == last.value) & (columns <= last.column)));
            counts -= is_in;
            vf below = value - view->largest;
            if (with_weight && v_any(is_in & (below > -28.0f))) { /* what is further weighs less than 1 */
                vf weight = hc_exponential(below) * (float)(1 << HC_PART);
                vi whole = __builtin_convertvector(weight, vi);
                vf rest = (weight - __builtin_convertvector(whole, vf)) * (float)(1 << HC_PART);
                high += is_in & whole;
                low += is_in & __builtin_convertvector(rest, vi);
            }
        }
        for (int lane = 0; lane < HC_W; lane++) {
            amount.count += (uint64_t)counts[lane];
            amount.weight += ((uint64_t)high[lane] << HC_PART) + (uint64_t)low[lane];
        }
    }
    return amount;
}

/* Floats in the order of whole numbers, and back. */
static inline int32_t hc_key(float x) {
    int32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits ^ ((bits >> 31) & INT32_MAX);
}

static inline float hc_of_key(int32_t key) {
    float x;
    key ^= (key >> 31) & INT32_MAX;
    memcpy(&x, &key, sizeof x);
    return x;
}

/* The largest value that so many reach, or one that up to twice as many do if `is_rough`; all must be that many. */
static float hc_value_of(const hc_view *view, uint64_t wanted, int is_rough) {
    int64_t reached = hc_key(-INFINITY), missed = (int64_t)hc_key(view->largest) + 1;
    while (missed - reached > 1) {
        int64_t middle = reached + (missed - reached) / 2;
        uint64_t count = hc_measure(view, (hc_place){hc_of_key((int32_t)middle), INT32_MAX}, 0).count;
        if (count < wanted)
            missed = middle;
        else
            reached = middle;
        if (is_rough && count >= wanted && count <= 2 * wanted)
            break;
    }
    return hc_of_key((int32_t)reached);
}

/* The place that so many are at or before; all must be that many. */
static hc_place hc_place_of(const hc_view *view, uint64_t wanted, uint64_t columns) {
    hc_place place = {hc_value_of(view, wanted, 0), -1};
    int64_t reached = (int64_t)columns - 1, missed = -1;
    while (reached - missed > 1) {
        place.column = (int32_t)(missed + (reached - missed) / 2);
        if (hc_measure(view, place, 0).count >= wanted)
            reached = place.column;
        else
            missed = place.column;
    }
    place.column = (int32_t)reached;
    return place;
}

#endif
