/* module_wgrad_fp8.c - the functions of epmoe._C for the gradient of weights in FP8. Exports
 * ep_wgrad_fp8_methods. The bytes of FP8 numbers are tensors of uint8. */
#include "python/module.h"

/* (x, x_scale, offsets, q, scales); see EpTranspose */
FAST(transpose_fp8) {
    EpTensor t[5];
    EpTranspose a = {0};
    int code;
    WANT(5);
    const EpTensor **const to[] = {&a.x, &a.x_scale, &a.offsets, &a.q, &a.scales};
    for (int i = 0; i < 5; i++)
        if (!ep_get_tensor(args[i], false, &t[i], to[i])) return NULL;
    void *stream = ep_stream_of(t[0].kind, t[0].device, args[0]);
    WITHOUT_LOCK(code = ep_transpose(&a, stream));
    return ep_done(code);
}

/* (x, q, transposed, scales, transposed_scales); see EpQuantizeWeight */
FAST(quantize_fp8_weight) {
    EpTensor t[5];
    EpQuantizeWeight a = {0};
    int code;
    WANT(5);
    const EpTensor **const to[] = {&a.x, &a.q, &a.transposed, &a.scales, &a.transposed_scales};
    for (int i = 0; i < 5; i++)
        if (!ep_get_tensor(args[i], false, &t[i], to[i])) return NULL;
    void *stream = ep_stream_of(t[0].kind, t[0].device, args[0]);
    WITHOUT_LOCK(code = ep_quantize_weight(&a, stream));
    return ep_done(code);
}

/* (a, b, a_scale, b_scale, offsets, tile_counter, out, scale); see EpWgradFp8 */
FAST(wgrad_fp8) {
    EpTensor t[7];
    EpWgradFp8 a = {0};
    int code;
    WANT(8);
    const EpTensor **const to[] = {&a.a, &a.b, &a.a_scale, &a.b_scale, &a.offsets, &a.tile_counter, &a.out};
    if (!ep_get_double(args[7], &a.scale)) return NULL;
    for (int i = 0; i < 7; i++)
        if (!ep_get_tensor(args[i], i == 5, &t[i], to[i])) return NULL;
    void *stream = ep_stream_of(t[0].kind, t[0].device, args[0]);
    WITHOUT_LOCK(code = ep_wgrad_fp8(&a, stream));
    return ep_done(code);
}

PyMethodDef ep_wgrad_fp8_methods[] = {
    METHOD(transpose_fp8), METHOD(quantize_fp8_weight), METHOD(wgrad_fp8), {NULL, NULL, 0, NULL}};
