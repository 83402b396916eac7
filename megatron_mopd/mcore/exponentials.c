/* The elementwise part of the log-prob head on a CPU: `add_exponentials` of objectives/logprob_head.py in one pass.
 *
 * As separate operations it takes three times as long, which is a fifth of the time of the products. What a block's
 * logits z say of each row's reference m, with the target's column left out:
 *
 *     d = min(z / temperature - m, limit)      E = exp(d)      sums += (sum E, sum E d, sum E^2)
 *
 * E is written as bfloat16 or float32, or not at all. Not-a-number stays what it is.
 * Promises (tests/parity/test_exponentials.py): equal to `add_exponentials`, but for rounding.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif

#define STRIP 512 /* columns that are worked on at a time */

static inline float power_of_two(int32_t n) {
    uint32_t bits = (uint32_t)(n + 127) << 23;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

/* Of -104 < x < 88, to 1e-7: 2^n times a polynomial of what remains, 2^n in two factors as it may be subnormal. */
static inline float exponential(float x) {
    const float n = rintf(x * 1.44269504f);
    const float r = (x - n * 0.693145752f) - n * 1.42860677e-6f; /* log 2 in two parts, the first has few digits */
    float p = 1.f / 5040;
    p = p * r + 1.f / 720;
    p = p * r + 1.f / 120;
    p = p * r + 1.f / 24;
    p = p * r + 1.f / 6;
    p = p * r + .5f;
    p = p * r + 1.f;
    p = p * r + 1.f;
    const int32_t whole = (int32_t)n, half = whole / 2;
    return p * power_of_two(half) * power_of_two(whole - half);
}

/* Of up to STRIP columns: E as float32, the sums added to. */
static inline void strip(
    const float *z, int32_t size, int32_t target, float m, float temperature, float limit, float sums[3], float *e) {
    const float inverse = 1.f / temperature;
    float s = 0, u = 0, q = 0;
#pragma omp simd reduction(+ : s, u, q)
    for (int32_t j = 0; j < size; j++) {
        const float about = z[j] * inverse, ratio = about + (z[j] - about * temperature) * inverse;
        const float d = ratio - m > limit ? limit : ratio - m;
        const float all = exponential(d < -104.f ? -104.f : d), x = j == target ? 0.f : all;
        s += x;
        u += x * d;
        q += x * x;
        e[j] = x;
    }
    sums[0] += s, sums[1] += u, sums[2] += q;
}

static inline void round_to_bfloat16(const float *x, int32_t size, uint16_t *out) { /* to nearest, even */
    for (int32_t j = 0; j < size; j++) {
        uint32_t bits;
        memcpy(&bits, x + j, 4);
        out[j] = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
}

/* logits [c, b], e [c, b] and sums [3, c] with a stride between rows; reference and column [c].
 * `bytes` of a number of e: 2, 4, or 0 for none. */
FOR_EACH_PROCESSOR void add_exponentials(
    const float *logits, int64_t stride, int64_t c, int64_t b, const float *reference, const int64_t *column,
    float temperature, float limit, float *sums, int64_t sums_stride, void *e, int64_t e_stride, int bytes) {
    float x[STRIP];
    for (int64_t i = 0; i < c; i++) {
        float of_row[3] = {0, 0, 0};
        for (int64_t start = 0; start < b; start += STRIP) {
            const int32_t size = (int32_t)(b - start < STRIP ? b - start : STRIP);
            const int64_t at = column[i] - start;
            const int32_t target = at < 0 || at >= size ? -1 : (int32_t)at;
            strip(logits + i * stride + start, size, target, reference[i], temperature, limit, of_row, x);
            if (bytes == 2) round_to_bfloat16(x, size, (uint16_t *)e + i * e_stride + start);
            if (bytes == 4) memcpy((float *)e + i * e_stride + start, x, (size_t)size * 4);
        }
        for (int k = 0; k < 3; k++) sums[k * sums_stride + i] += of_row[k];
    }
}
