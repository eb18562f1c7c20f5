/* activation_math.h - the gradient of an activation: the arithmetic of one column, for the CPU backend and
 * the kernel.
 *
 * Exports ep_act_gradient. A kernel defines EP_DEVICE_MATH before it includes this file, and has its own
 * ep_ex2 and ep_rcp. Only these and erff differ between the backends. */
#ifndef EP_ACTIVATION_MATH_H
#define EP_ACTIVATION_MATH_H
#include "protocol/activation.h"

#ifndef EP_DEVICE_MATH
EP_FN float ep_ex2(float x) { return exp2f(x); } /* 2^x */
EP_FN float ep_rcp(float x) { return 1.0f / x; }
#endif

typedef struct {
    float value, of_gate, of_up; /* the activation, and its derivatives */
} EpActivated;

/* x * sigmoid(alpha * x), or for a GELU with tanh x * sigmoid(alpha * (x + 0.044715 x^3)), and its
 * derivative. Where the slope of the sigmoid is 0, its factor may be infinite, and the product is 0. */
EP_FN void ep_act_gate(bool is_tanh, float alpha, float x, float *value, float *slope) {
    const float arg = is_tanh ? x + 0.044715f * x * x * x : x;
    const float s = ep_rcp(1.0f + ep_ex2(-1.44269504f * (alpha * arg)));
    const float of_sigmoid = s * (1.0f - s);
    const float of_arg = is_tanh ? 1.0f + 0.134145f * x * x : 1.0f;
    *value = x * s;
    *slope = of_sigmoid == 0 ? s : s + alpha * x * of_arg * of_sigmoid;
}

EP_HANDLES_ALL(EP_NUM_ACTIVATIONS, 10);
/* v: the gate, or the only column; u: up. NaN gives NaN. A clamped number has the derivative 0, as in torch;
 * a number equal to its limit is not clamped. */
EP_FN EpActivated ep_act_gradient(uint32_t activation, float alpha, float limit, float v, float u) {
    EpActivated a = {v, 1, 0};
    float slope;
    if (EP_ACT_IS_GATED(activation)) {
        const bool is_tanh = activation == EP_ACT_GEGLU_TANH;
        const bool plus_one = activation == EP_ACT_GPT_OSS || activation == EP_ACT_SWIGLU_PLUS_ONE;
        float gate;
        ep_act_gate(is_tanh, alpha, v > limit ? limit : v, &gate, &slope);
        const float up = (u > limit ? limit : u < -limit ? -limit : u) + (plus_one ? 1.0f : 0.0f);
        a.value = gate * up;
        a.of_gate = v > limit ? 0 : slope * up;
        a.of_up = u > limit || u < -limit ? 0 : gate;
    } else if (activation == EP_ACT_GELU) {
        const float cdf = 0.5f + 0.5f * erff(v * 0.70710678f);
        const float pdf = 0.39894228f * ep_ex2(-0.72134752f * v * v);
        a.value = v * cdf;
        a.of_gate = pdf == 0 ? cdf : cdf + v * pdf;
    } else if (activation == EP_ACT_RELU2) {
        const float x = v < 0 ? 0 : v;
        a.value = x * x;
        a.of_gate = 2 * x;
    } else if (activation == EP_ACT_GELU_TANH || activation == EP_ACT_SILU) {
        ep_act_gate(activation == EP_ACT_GELU_TANH, alpha, v, &a.value, &a.of_gate);
    }
    return a;
}

#endif /* EP_ACTIVATION_MATH_H */
