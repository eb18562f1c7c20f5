/* test_quantize.c - rows to FP8: the activations, compared with their definitions in double precision, the
 * functions that they use, and the numbers that they accept. */
#include "e4m3.h"
#include "harness.h"
#include "protocol/activation_math.h"

enum { NUM_ROWS = 3, NUM_COLS = 200, NUM_GROUPS = 2 };
static const float alpha = 1.25f, limit = 3;

static double sigmoid(double t) { return 1 / (1 + exp(-t)); }
/* The definition of an activation without a gate. */
static double ungated(uint32_t activation, double x) {
    switch (activation) {
    case EP_ACT_NONE: return x;
    case EP_ACT_GELU: return x * (1 + erf(x / sqrt(2))) / 2;
    case EP_ACT_RELU2: return x < 0 ? 0 : x * x;
    case EP_ACT_GELU_TANH: return x * sigmoid(2 * sqrt(2 / acos(-1)) * (x + 0.044715 * x * x * x));
    default: return x * sigmoid(x);
    }
}
/* The definition of a gated activation of gate x and up value u. */
static double gated(uint32_t activation, double x, double u) {
    if (activation == EP_ACT_SWIGLU) return x * sigmoid(x) * u;
    if (activation == EP_ACT_GEGLU_TANH) return ungated(EP_ACT_GELU_TANH, x) * u;
    const double offset = activation == EP_ACT_SWIGLU_NUMBERS ? 0 : 1;
    x = fmin(x, limit);
    return x * sigmoid(alpha * x) * (fmax(fmin(u, limit), -limit) + offset);
}
/* Column c of a row after its activation. The row has all gates before the ups, or for GPT_OSS pairs. */
static double wanted(uint32_t activation, const float *row, uint32_t c) {
    if (!EP_ACT_IS_GATED(activation)) return ungated(activation, row[c]);
    if (activation == EP_ACT_GPT_OSS) return gated(activation, row[2 * c], row[2 * c + 1]);
    return gated(activation, row[c], row[NUM_COLS + c]);
}

static int quantize(EpActivation activation, const float *x, uint32_t num_rows, uint8_t *q, float *scales) {
    const int64_t width = EP_ACT_IS_GATED(activation.kind) ? 2 * NUM_COLS : NUM_COLS;
    const EpTensor of_x = tensor2(x, EP_F32, num_rows, width), of_q = tensor2(q, EP_U8, num_rows, NUM_COLS),
                   of_scales = tensor2(scales, EP_F32, NUM_GROUPS, num_rows);
    const EpQuantize args = {.activation = activation, .x = &of_x, .q = &of_q, .scales = &of_scales};
    return ep_quantize(&args, NULL);
}

/* An e4m3 number is wrong by at most 1 / 16 of itself, or by half of the least number of its group. */
static bool check_group(uint32_t activation, const float *row, uint32_t begin, uint32_t end, const uint8_t *q,
                        double scale) {
    double most = 0;
    for (uint32_t c = begin; c < end; c++) most = fmax(most, fabs(wanted(activation, row, c)));
    CHECK(NULL, fabs(scale * 448 - most) <= 1e-4 * most);
    for (uint32_t c = begin; c < end; c++) {
        const double want = wanted(activation, row, c), size = e4m3_value(q[c] & 127) * scale;
        CHECK(NULL, fabs((q[c] & 128 ? -size : size) - want) <= fabs(want) / 15 + scale / 500);
    }
    return true;
}

bool test_quantize_activations(void) {
    float *x = (float *)alloc_exact(4ull * NUM_ROWS * 2 * NUM_COLS);
    uint8_t *q = (uint8_t *)alloc_exact(NUM_ROWS * NUM_COLS);
    float *scales = (float *)alloc_exact(4ull * NUM_GROUPS * NUM_ROWS);
    Rng rng = {test_seed};
    for (uint32_t i = 0; i < NUM_ROWS * 2 * NUM_COLS; i++)
        x[i] = (float)rng_below(&rng, 10001) / 1000 - 5; /* also beyond the limit */
    for (uint32_t activation = EP_ACT_NONE; activation < EP_NUM_ACTIVATIONS; activation++) {
        CHECK_CODE(NULL, 0, quantize((EpActivation){activation, alpha, limit}, x, NUM_ROWS, q, scales));
        for (uint32_t r = 0; r < NUM_ROWS; r++) {
            const float *row = x + r * NUM_COLS * (EP_ACT_IS_GATED(activation) ? 2 : 1);
            for (uint32_t g = 0; g < NUM_GROUPS; g++)
                TRY(check_group(activation, row, g * 128, g ? NUM_COLS : 128, q + r * NUM_COLS,
                                scales[g * NUM_ROWS + r]));
        }
    }
    free(x);
    free(q);
    free(scales);
    return true;
}

/* The functions have the accuracy that activation_math.h promises. */
bool test_quantize_functions(void) {
    const double least = ldexp(1, -22);
    for (uint32_t i = 0; i < 5000; i++) {
        const float d = (float)ldexp(1 + i / 5000.0, (int)(i % 126)), t = (float)i / 20 - 125;
        CHECK(NULL, fabs(ep_quantize_reciprocal(d) * (double)d - 1) <= least);
        CHECK(NULL, fabs(ep_quantize_exp2(t) / exp2(t) - 1) <= least);
    }
    CHECK(NULL, ep_quantize_exp2(-1000) == 0x1p-125f && ep_quantize_exp2(1000) == 0x1p125f);
    return true;
}

/* The activations with numbers need a finite alpha and a positive limit. The others ignore both. */
bool test_quantize_refuses_numbers(void) {
    const float wrong[][2] = {{NAN, 1}, {INFINITY, 1}, {-INFINITY, 1}, {1, 0}, {1, -1}, {1, NAN}};
    for (uint32_t activation = EP_ACT_NONE; activation < EP_NUM_ACTIVATIONS; activation++) {
        const bool has_numbers = activation == EP_ACT_GPT_OSS || activation == EP_ACT_SWIGLU_NUMBERS ||
                                 activation == EP_ACT_SWIGLU_PLUS_ONE;
        CHECK_CODE(NULL, 0, quantize((EpActivation){activation, -1, INFINITY}, NULL, 0, NULL, NULL));
        for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
            CHECK_CODE(NULL, has_numbers ? EP_EINVAL : 0,
                       quantize((EpActivation){activation, wrong[i][0], wrong[i][1]}, NULL, 0, NULL, NULL));
    }
    CHECK_CODE(NULL, EP_EINVAL, quantize((EpActivation){EP_NUM_ACTIVATIONS, 1, 1}, NULL, 0, NULL, NULL));
    return true;
}
