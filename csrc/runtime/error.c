/* error.c - stores the text of each thread's last error; names exceptions and words. See error.h and
 * epmoe.h. */
#include "runtime/error.h"

#include <stdarg.h>
#include <stdio.h>

static _Thread_local char text[512];

int ep_error(int code, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return code;
}

const char *ep_error_text(void) { return text; }

const char *ep_error_name(int code) {
#define X(name, value, exception, what) \
    if (code == name) return exception;
    EP_ERRORS(X)
#undef X
    return "EpError";
}

const char *ep_word_name(uint32_t word) {
    switch (word) {
#define X(NAME, what) \
    case EP_WORD_##NAME: return what;
        EP_WORDS(X)
#undef X
    default: return "";
    }
}
