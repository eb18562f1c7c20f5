/* error.h - how a function of the library fails: EP_TRY, and the text of the thread's last error. */
#ifndef EP_ERROR_H
#define EP_ERROR_H
#include "epmoe.h"

/* Remember why, return the code. */
__attribute__((format(printf, 2, 3))) int ep_error(int code, const char *format, ...);
/* What a fault record calls the word that was waited for, an EpWord; "" for others. */
const char *ep_word_name(uint32_t word);

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
