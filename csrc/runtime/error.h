/* error.h - how functions of the library report an error: they return a code and set a text.
 * Exports: ep_error, ep_word_name, ep_op_name, ep_fault_error, EP_TRY and EP_TRY_GOTO.
 * Invariant: each thread has its own text, that of its last error; ep_error_text (epmoe.h) returns it. */
#ifndef EP_ERROR_H
#define EP_ERROR_H
#include "epmoe.h"
#include "protocol/host.h"

/* Set the error text of this thread, and return the code. No argument may point to the old text: copy it. */
__attribute__((format(printf, 2, 3))) int ep_error(int code, const char *format, ...);
/* The name of an EpWord, for the text of a fault record. "" if the number is no EpWord. */
const char *ep_word_name(uint32_t word);
/* The name of an operation in its dtype, an EP_OP_WORD, for a text: ep_op_name(word).text. */
typedef struct {
    char text[48];
} EpOpName;
EpOpName ep_op_name(uint32_t word);
/* Set the error text for a fault record of a buffer of this shape, and return its code. */
int ep_fault_error(const EpFaultRecord *fault, const EpShape *shape, uint32_t my_rank);

/* Return, or go to the label, if the call fails. */

#define EP_TRY(call)                   \
    do {                               \
        int ep_code_ = (call);         \
        if (ep_code_) return ep_code_; \
    } while (0)
#define EP_TRY_GOTO(code, call, label) \
    do {                               \
        (code) = (call);               \
        if (code) goto label;          \
    } while (0)

#endif /* EP_ERROR_H */
