/* cudaTypedefs.h - a fake: the types of the driver's functions that csrc/cuda looks up by name. */
#ifndef FAKE_CUDA_TYPEDEFS_H
#define FAKE_CUDA_TYPEDEFS_H
#include <cuda.h>

typedef CUresult (*PFN_cuTensorMapEncodeTiled_v12000)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                                                      const cuuint64_t *, const cuuint64_t *,
                                                      const cuuint32_t *, const cuuint32_t *,
                                                      CUtensorMapInterleave, CUtensorMapSwizzle,
                                                      CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
typedef CUresult (*PFN_cuDevicePrimaryCtxGetState_v7000)(CUdevice_v1, unsigned *, int *);
typedef CUresult (*PFN_cuDevicePrimaryCtxRetain_v7000)(CUcontext *, CUdevice_v1);
typedef CUresult (*PFN_cuCtxPushCurrent_v4000)(CUcontext);
typedef CUresult (*PFN_cuCtxPopCurrent_v4000)(CUcontext *);

#endif /* FAKE_CUDA_TYPEDEFS_H */
