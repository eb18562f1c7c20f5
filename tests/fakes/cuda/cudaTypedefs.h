/* cudaTypedefs.h - a fake: the type of the driver's function that encodes a tensor map. */
#ifndef FAKE_CUDA_TYPEDEFS_H
#define FAKE_CUDA_TYPEDEFS_H
#include <cuda.h>

typedef CUresult (*PFN_cuTensorMapEncodeTiled_v12000)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                                                      const cuuint64_t *, const cuuint64_t *,
                                                      const cuuint32_t *, const cuuint32_t *,
                                                      CUtensorMapInterleave, CUtensorMapSwizzle,
                                                      CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

#endif /* FAKE_CUDA_TYPEDEFS_H */
