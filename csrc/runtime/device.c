/* device.c - what a device can do. Exports ep_device_query. */
#include "backend.h"

int ep_device_query(int device, EpDevice *out) {
    const EpBackend *backend = ep_backend(EP_CUDA);
    return backend ? backend->query(device, out) : EP_EINVAL;
}
