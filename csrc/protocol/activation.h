/* activation.h - the list of the activations, and an activation with its numbers: what a caller chooses, and
 * what kernels get. Exports EP_ACTIVATIONS and what follows from it, EpActivation and ep_act_*. What each of
 * them computes is in activation_math.h. */
#ifndef EP_ACTIVATION_H
#define EP_ACTIVATION_H
#include <math.h>

#include "protocol/port.h"

/* The activations, in the order of their kinds: X(NAME, name, COLUMNS, alpha).
 *   name     in Python; activations.py says what each computes, activation_math.h how
 *   COLUMNS  of the product for a column of the output. ONE. GATES_FIRST: a gate and an up, and in the
 *            weights all gates come before the ups. MIXED: a gate and an up, which alternate in the weights
 *   alpha    the constant in the sigmoid, where the activation has one; EP_ACT_GIVEN: the caller gives the
 *            numbers of EpActivation
 *
 * NONE, GELU, SWIGLU and GPT_OSS are compiled into kernels of their own. The others share kernels: those with
 * gates EP_ACT_ANY_GATE, those without EP_ACT_ANY_UNGATED. A shared kernel reads the kind at run time.
 * A new activation without gates becomes the last row. */
#define EP_ACT_GIVEN 0.0f
#define EP_ACT_OF_TANH 1.59576912f /* 2 * sqrt(2 / pi) */
#define EP_ACTIVATIONS(X)                                                                     \
    X(NONE, "none", ONE, 1.0f)                                                                \
    X(GELU, "gelu", ONE, 1.0f)                                                                \
    X(SWIGLU, "swiglu", GATES_FIRST, 1.0f)                                                    \
    X(GPT_OSS, "gpt_oss", MIXED, EP_ACT_GIVEN)                                                \
    X(SWIGLU_NUMBERS, "swiglu_numbers", GATES_FIRST, EP_ACT_GIVEN)                            \
    X(SWIGLU_PLUS_ONE, "swiglu_plus_one", GATES_FIRST, EP_ACT_GIVEN) /* up + 1, as GPT_OSS */ \
    X(GEGLU_TANH, "geglu_tanh", GATES_FIRST, EP_ACT_OF_TANH)                                  \
    X(RELU2, "relu2", ONE, 1.0f)                                                              \
    X(GELU_TANH, "gelu_tanh", ONE, EP_ACT_OF_TANH)                                            \
    X(SILU, "silu", ONE, 1.0f)
typedef enum { EP_COLUMNS_ONE, EP_COLUMNS_GATES_FIRST, EP_COLUMNS_MIXED } EpActivationColumns;
typedef enum {
#define X(NAME, name, COLUMNS, alpha) EP_ACT_##NAME,
    EP_ACTIVATIONS(X)
#undef X
        EP_NUM_ACTIVATIONS,
    EP_ACT_ANY_GATE = EP_ACT_SWIGLU_NUMBERS,
    EP_ACT_ANY_UNGATED = EP_ACT_RELU2
} EpActivationKind;
/* The gates are neighbours in the list, and one is mixed: kernels need two comparisons, and one. */
#define EP_ACT_IS_GATED(act) ((act) >= EP_ACT_SWIGLU && (act) < EP_ACT_ANY_UNGATED)
#define EP_ACT_IS_MIXED(act) ((act) == EP_ACT_GPT_OSS)
#define X(NAME, name, COLUMNS, alpha)                                                                  \
    EP_STATIC_ASSERT(EP_ACT_IS_GATED(EP_ACT_##NAME) == (EP_COLUMNS_##COLUMNS != EP_COLUMNS_ONE) &&     \
                         EP_ACT_IS_MIXED(EP_ACT_##NAME) == (EP_COLUMNS_##COLUMNS == EP_COLUMNS_MIXED), \
                     "gates stand from SWIGLU to RELU2, and GPT_OSS is the mixed one");
EP_ACTIVATIONS(X)
#undef X
/* X(activation): those for which kernels are compiled, and which of them computes an activation. */
#define EP_ACT_KERNELS(X) \
    X(EP_ACT_NONE) X(EP_ACT_GELU) X(EP_ACT_SWIGLU) X(EP_ACT_GPT_OSS) X(EP_ACT_ANY_GATE) X(EP_ACT_ANY_UNGATED)
#define EP_ACT_KERNEL(act) \
    ((act) < EP_ACT_ANY_GATE ? (act) : EP_ACT_IS_GATED(act) ? EP_ACT_ANY_GATE : EP_ACT_ANY_UNGATED)

/* An activation and its numbers. Python gives a tuple: the kind, and then the numbers in the order of
 * EP_ACT_NUMBERS (as_kernel in activations.py). A new number is a row there and a field. */
#define EP_ACT_NUMBERS(X) \
    X(alpha)              \
    X(limit)
typedef struct {
    uint32_t kind; /* EpActivationKind */
    float alpha;   /* the constant in the sigmoid */
    float limit;   /* of a gate, and of the magnitude of its up */
} EpActivation;

/* alpha of a kind that exists, or EP_ACT_GIVEN. */
EP_PURE float ep_act_alpha(uint32_t kind) {
#define X(NAME, name, COLUMNS, alpha) \
    if (kind == EP_ACT_##NAME) return alpha;
    EP_ACTIVATIONS(X)
#undef X
    return 1.0f;
}
EP_PURE bool ep_act_has_numbers(uint32_t kind) { return ep_act_alpha(kind) == EP_ACT_GIVEN; }
/* Whether the activation exists, and the caller's numbers, if it has any, are valid: a finite alpha and a
 * positive limit. */
EP_PURE bool ep_act_is_valid(EpActivation a) {
    return a.kind < EP_NUM_ACTIVATIONS &&
           (!ep_act_has_numbers(a.kind) || (a.alpha - a.alpha == 0 && a.limit > 0));
}
/* A valid activation, where numbers that the caller does not choose are those of the list. */
EP_PURE EpActivation ep_act_with_numbers(EpActivation a) {
    if (ep_act_has_numbers(a.kind)) return a;
    a.alpha = ep_act_alpha(a.kind);
    a.limit = INFINITY;
    return a;
}

#endif /* EP_ACTIVATION_H */
