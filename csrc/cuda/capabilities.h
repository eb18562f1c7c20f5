/* capabilities.h - what a GPU can do. Each GPU is asked once. */
#ifndef EP_CAPABILITIES_H
#define EP_CAPABILITIES_H
#include <stdbool.h>
#include <stdint.h>

#define EP_MAX_DEVICES 64 /* GPUs that a process can use */
/* Shared memory on Hopper, in bytes: each of num_ctas CTAs on an SM can have so much. An SM has 228 KB, of
 * which the GPU keeps 1 KB for each CTA. */
#define EP_SMEM_OF_CTAS(num_ctas) ((228 << 10) / (num_ctas) - (1 << 10))
#define EP_CTA_SMEM_BYTES EP_SMEM_OF_CTAS(1)
#define EP_HALF_SM_SMEM_BYTES EP_SMEM_OF_CTAS(2)

typedef struct {
    uint32_t major, minor; /* the compute capability */
    uint32_t num_sms;
    uint32_t smem_bytes; /* shared memory that a CTA can have */
    bool has_hopper;     /* the kernels for sm_90a, which include the megakernels, run here */
    bool is_shared;      /* ranks share it; see ep_share_device */
} EpCapabilities;

#ifdef __cplusplus
extern "C" {
#endif
/* The number of the current device. Returns a cudaError_t. */
int ep_current_device(uint32_t *device);
/* What the current device can do. Returns a cudaError_t. */
int ep_capabilities(EpCapabilities *c);
/* From now on the current device is one that ranks share. Returns a cudaError_t. */
int ep_share_device(void);
/* The PTX version of the code of a kernel that runs on the current device, for example 90. All files are
 * compiled for the same architectures, so any kernel can tell. words.cu has it. Returns a cudaError_t. */
int ep_ptx_version(int *version);
#ifdef __cplusplus
}
#endif

#endif /* EP_CAPABILITIES_H */
