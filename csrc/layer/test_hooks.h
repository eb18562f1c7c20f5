/* test_hooks.h - what only tests call: epmoe._C.layer_set_epoch and the C tests. */
#ifndef EP_TEST_HOOKS_H
#define EP_TEST_HOOKS_H
#include "epmoe.h"

/* Set the epoch of the next operation of a buffer, so that a test reaches epochs of more than 32 bits. */
int ep_layer_set_epoch(EpLayer *layer, uint32_t buffer, uint64_t epoch, void *stream);

#endif /* EP_TEST_HOOKS_H */
