/* tensor_maps.h - tensor maps as the driver encodes them, cached for later launches. */
#ifndef EP_TENSOR_MAPS_H
#define EP_TENSOR_MAPS_H
#include <cuda.h>
#include <stdbool.h>

#include "kernels/gemm/gemm_maps.h"

/* The maps that are cached. A model of 48 layers has 96 tensors of weights. A training step uses each of them
 * in two products, and uses about as many tensors of rows. */
#define EP_MAP_SETS 256
#define EP_MAP_WAYS 4

/* Copy the tensor map that an earlier ep_encode_tensor_map has made for an equal shape, or return false. */
bool ep_find_tensor_map(const EpTensorMap *shape, CUtensorMap *map);
/* Encode a tensor map, and cache it for ep_find_tensor_map. Returns a cudaError_t; after an error nothing is
 * cached. Before the call, this thread must have made a call of the runtime that creates a context, because
 * the driver encodes only in a thread with a current context. */
int ep_encode_tensor_map(const EpTensorMap *shape, CUtensorMap *map);

#endif /* EP_TENSOR_MAPS_H */
