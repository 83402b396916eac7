/* MXFP4 on a CPU: `fake_quantize` and `encode_mxfp4` of formats.py in one pass over the blocks, with the same bits.
 *
 * As separate operations a weight crosses the memory a dozen times. See formats.py for the format, the three rules and
 * the special values; the steps here are the same steps.
 * Promises (tests/unit/test_mxfp4_compiled.py): bit for bit what the operations of formats.py give.
 */
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif
#define INLINE static inline __attribute__((always_inline))

#define BLOCK 32
#define INFINITY_BITS 0x7f800000
#define NAN_BITS 0x7fc00000
#define NAN_BYTE 255

INLINE float float_of(int32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

INLINE int32_t bits_of(float x) {
    int32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

/* 2^(byte - 127); byte 0 is the one subnormal. */
INLINE float power_of_two(int32_t byte) { return float_of(byte > 0 ? byte << 23 : 0x400000); }

/* Bits of a block as float32. */
INLINE void load(const void *x, int bytes, int32_t bits[BLOCK]) {
    if (bytes == 4) {
        memcpy(bits, x, 4 * BLOCK);
    } else {
        uint16_t half[BLOCK];
        memcpy(half, x, sizeof half);
        for (int j = 0; j < BLOCK; j++) bits[j] = (int32_t)((uint32_t)half[j] << 16);
    }
}

INLINE int32_t scale_byte(const int32_t bits[BLOCK], int32_t round_up, int32_t of_infinity) {
    int32_t amax = 0;
    for (int j = 0; j < BLOCK; j++) {
        const int32_t size = bits[j] & 0x7fffffff;
        amax = size > amax ? size : amax;
    }
    if (amax >= INFINITY_BITS) return amax > INFINITY_BITS ? NAN_BYTE : of_infinity;
    const int32_t byte = ((amax + round_up) >> 23) - 2;
    return byte > 0 ? byte : 0;
}

/* |x| / scale as the nearest E2M1 value. A float32 of 2^23 steps has no digits below one. */
INLINE float rounded(int32_t bits, float inverse) {
    const float size = float_of(bits & 0x7fffffff) * inverse, y = size > 6.f ? 6.f : size;
    const float power = float_of(bits_of(y) & INFINITY_BITS), shift = (power < 1.f ? 1.f : power) * 6291456.f;
    return (y + shift) - shift;
}

INLINE void fake_quantize_blocks(
    const char *x, char *out, int64_t blocks, int bytes, int32_t round_up, int32_t of_infinity) {
    for (int64_t i = 0; i < blocks; i++) {
        int32_t bits[BLOCK], result[BLOCK];
        load(x + i * BLOCK * bytes, bytes, bits);
        const int32_t byte = scale_byte(bits, round_up, of_infinity);
        if (byte == NAN_BYTE) {
            for (int j = 0; j < BLOCK; j++) result[j] = NAN_BITS;
        } else {
            const float scale = power_of_two(byte), inverse = power_of_two(254 - byte);
            for (int j = 0; j < BLOCK; j++)
                result[j] = bits_of(rounded(bits[j], inverse) * scale) | (bits[j] & INT32_MIN);
        }
        if (bytes == 4) {
            memcpy(out + i * BLOCK * 4, result, sizeof result);
        } else { /* exact: the values have two digits */
            uint16_t half[BLOCK];
            for (int j = 0; j < BLOCK; j++) half[j] = (uint16_t)((uint32_t)result[j] >> 16);
            memcpy(out + i * BLOCK * 2, half, sizeof half);
        }
    }
}

INLINE void encode_blocks(
    const char *x, uint8_t *packed, uint8_t *scales, int64_t blocks, int bytes, int32_t round_up, int32_t of_infinity) {
    for (int64_t i = 0; i < blocks; i++) {
        int32_t bits[BLOCK], code[BLOCK];
        load(x + i * BLOCK * bytes, bytes, bits);
        const int32_t byte = scale_byte(bits, round_up, of_infinity);
        const float inverse = power_of_two(254 - byte);
        for (int j = 0; j < BLOCK; j++) {
            const float y = rounded(bits[j], inverse);
            const int32_t from_one = (bits_of(y) >> 22) - 252, least = y > 0.f; /* from 1 on they are bits of y */
            code[j] = (from_one > least ? from_one : least) | (int32_t)((uint32_t)bits[j] >> 28 & 8);
        }
        for (int j = 0; j < BLOCK / 2; j++)
            packed[i * (BLOCK / 2) + j] = byte == NAN_BYTE ? 0 : (uint8_t)(code[2 * j] | code[2 * j + 1] << 4);
        scales[i] = (uint8_t)byte;
    }
}

/* Contiguous blocks of numbers of 2 bytes (bfloat16) or 4 (float32). */
FOR_EACH_PROCESSOR void fake_quantize(
    const void *x, void *out, int64_t blocks, int bytes, int32_t round_up, int32_t of_infinity) {
    if (bytes == 4) fake_quantize_blocks(x, out, blocks, 4, round_up, of_infinity);
    if (bytes == 2) fake_quantize_blocks(x, out, blocks, 2, round_up, of_infinity);
}

FOR_EACH_PROCESSOR void encode(
    const void *x, uint8_t *packed, uint8_t *scales, int64_t blocks, int bytes, int32_t round_up, int32_t of_infinity) {
    if (bytes == 4) encode_blocks(x, packed, scales, blocks, 4, round_up, of_infinity);
    if (bytes == 2) encode_blocks(x, packed, scales, blocks, 2, round_up, of_infinity);
}
