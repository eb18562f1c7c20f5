/* module_gemm.c - the functions of epmoe._C that need no world: the grouped GEMM by itself, the gradient of
 * an activation, the physical experts of choices, rows and weights of 4 bits to FP8, and what a device can
 * do. Exports ep_gemm_methods. */
#include "protocol/gemm_params.h"
#include "python/module.h"

/* (kind, activation, scale, a, b, offsets, bias, row_weight, tile_counter, out, is_portable, a_scale,
 * b_scale, b_zero, saved, low_a, low_b, expected_rows, clears); with both scales a and b are the bytes of FP8
 * numbers, with b_scale alone b has 4 bits */
FAST(grouped_gemm) {
    EpTensor t[13];
    EpGemm g = {0};
    uint32_t is_portable, clears;
    int code;
    WANT(19);
    const EpTensor **const optional[] = {&g.a_scale, &g.b_scale, &g.b_zero, &g.saved, &g.low_a, &g.low_b};
    const EpTensor **const to[] = {&g.a, &g.b, &g.offsets, &g.bias, &g.row_weight, &g.tile_counter, &g.out};
    if (!ep_get_u32(args[0], &g.kind) || !ep_get_activation(args[1], &g.activation) ||
        !ep_get_double(args[2], &g.scale) || !ep_get_u32(args[10], &is_portable) ||
        !ep_get_u64(args[17], &g.expected_rows) || !ep_get_u32(args[18], &clears))
        return NULL;
    for (int i = 0; i < 7; i++)
        if (!ep_get_tensor(args[3 + i], i >= 3 && i <= 5, &t[i], to[i])) return NULL;
    for (int i = 0; i < 6; i++)
        if (!ep_get_tensor(args[11 + i], true, &t[7 + i], optional[i])) return NULL;
    g.is_portable = is_portable != 0;
    g.clears = clears != 0;
    void *stream = ep_stream_of(t[0].kind, t[0].device, args[3]);
    WITHOUT_LOCK(code = ep_grouped_gemm(&g, stream));
    return ep_done(code);
}

/* (activation, h, d, offsets, row_weight, d_h, weighted, dots, d_h_scale, weighted_scale, is_rowwise); see
 * EpActivationArgs */
FAST(activation) {
    EpTensor t[9];
    EpActivationArgs a = {0};
    uint32_t is_rowwise;
    int code;
    WANT(11);
    const EpTensor **const to[] = {&a.h,        &a.d,    &a.offsets,   &a.row_weight,    &a.d_h,
                                   &a.weighted, &a.dots, &a.d_h_scale, &a.weighted_scale};
    if (!ep_get_activation(args[0], &a.activation) || !ep_get_u32(args[10], &is_rowwise)) return NULL;
    a.is_rowwise = is_rowwise != 0;
    for (int i = 0; i < 9; i++) /* row_weight and the scales may be None */
        if (!ep_get_tensor(args[1 + i], i == 3 || i >= 7, &t[i], to[i])) return NULL;
    void *stream = ep_stream_of(t[0].kind, t[0].device, args[1]);
    WITHOUT_LOCK(code = ep_activation(&a, stream));
    return ep_done(code);
}

/* (activation, x, num_rows, q, scales, is_pow2, is_rowwise): the bytes of FP8 numbers */
FAST(quantize_fp8) {
    EpTensor t[4];
    EpQuantize a = {0};
    uint32_t is_pow2, is_rowwise;
    int code;
    WANT(7);
    const EpTensor **const to[] = {&a.x, &a.num_rows, &a.q, &a.scales};
    if (!ep_get_activation(args[0], &a.activation) || !ep_get_u32(args[5], &is_pow2) ||
        !ep_get_u32(args[6], &is_rowwise))
        return NULL;
    for (int i = 0; i < 4; i++)
        if (!ep_get_tensor(args[1 + i], i == 1, &t[i], to[i])) return NULL;
    a.is_pow2 = is_pow2 != 0;
    a.is_rowwise = is_rowwise != 0;
    void *stream = ep_stream_of(t[0].kind, t[0].device, args[1]);
    WITHOUT_LOCK(code = ep_quantize(&a, stream));
    return ep_done(code);
}

/* (q, scales, to); see EpRescaleWeight */
FAST(rescale_fp8_weight) {
    EpTensor t[3];
    EpRescaleWeight a = {0};
    int code;
    WANT(3);
    const EpTensor **const to[] = {&a.q, &a.scales, &a.to};
    for (int i = 0; i < 3; i++)
        if (!ep_get_tensor(args[i], false, &t[i], to[i])) return NULL;
    void *stream = ep_stream_of(t[0].kind, t[0].device, args[0]);
    WITHOUT_LOCK(code = ep_rescale_weight(&a, stream));
    return ep_done(code);
}

/* (topk_idx, table, out, rank); see EpMapChoices */
FAST(map_choices) {
    EpTensor t[3];
    EpMapChoices a = {0};
    int code;
    WANT(4);
    const EpTensor **const to[] = {&a.indices, &a.table, &a.out};
    if (!ep_get_u32(args[3], &a.rank)) return NULL;
    for (int i = 0; i < 3; i++)
        if (!ep_get_tensor(args[i], false, &t[i], to[i])) return NULL;
    void *stream = ep_stream_of(t[0].kind, t[0].device, args[0]);
    WITHOUT_LOCK(code = ep_map_choices(&a, stream));
    return ep_done(code);
}

/* (held, replicas, count, table); see EpExpertMap */
FAST(fill_expert_map) {
    EpTensor t[4];
    EpExpertMap a;
    WANT(4);
    const EpTensor **const to[] = {&a.held, &a.replicas, &a.count, &a.table};
    for (int i = 0; i < 4; i++)
        if (!ep_get_tensor(args[i], false, &t[i], to[i])) return NULL;
    return ep_done(ep_fill_expert_map(&a));
}

/* (tensor): for launches on the current stream of the tensor's device */
FAST(gemm_has_counter) {
    EpTensor t;
    const EpTensor *tensor;
    bool has;
    int code;
    WANT(1);
    if (!ep_get_tensor(args[0], false, &t, &tensor)) return NULL;
    if (t.kind != EP_CUDA) Py_RETURN_TRUE; /* the CPU counts no tiles */
    void *stream = ep_stream_of(t.kind, t.device, args[0]);
    WITHOUT_LOCK(code = ep_gemm_has_counter(t.device, stream, &has));
    return code ? ep_raise(code) : PyBool_FromLong(has);
}

/* (device) */
FAST(device_query) {
    EpDevice d;
    int device, code;
    WANT(1);
    if (!ep_get_int(args[0], &device)) return NULL;
    WITHOUT_LOCK(code = ep_device_query(device, &d));
    return code ? ep_raise(code)
                : Py_BuildValue("IIIO", d.major, d.minor, d.num_sms, d.has_hopper ? Py_True : Py_False);
}

/* (numbers, scales, zeros, q, q_scales, to, is_f16); see EpExpand */
FAST(expand_fp8) {
    EpTensor t[6];
    EpExpand a = {0};
    uint32_t is_f16;
    int code;
    WANT(7);
    const EpTensor **const to[] = {&a.numbers, &a.scales, &a.zeros, &a.q, &a.q_scales, &a.to};
    if (!ep_get_u32(args[6], &is_f16)) return NULL;
    for (int i = 0; i < 6; i++)
        if (!ep_get_tensor(args[i], i == 2 || i == 5, &t[i], to[i])) return NULL;
    a.dtype = is_f16 ? EP_F16 : EP_BF16;
    void *stream = ep_stream_of(t[0].kind, t[0].device, args[0]);
    WITHOUT_LOCK(code = ep_expand(&a, stream));
    return ep_done(code);
}

PyMethodDef ep_gemm_methods[] = {METHOD(grouped_gemm),       METHOD(activation),       METHOD(quantize_fp8),
                                 METHOD(rescale_fp8_weight), METHOD(expand_fp8),       METHOD(map_choices),
                                 METHOD(fill_expert_map),    METHOD(gemm_has_counter), METHOD(device_query),
                                 {NULL, NULL, 0, NULL}};
