/* module_world.c - epmoe._C.world_*: the functions of worlds. Exports ep_world_methods. */
#include <string.h>

#include "python/module.h"

static void free_world(PyObject *c) {
    EpWorld *w = (EpWorld *)PyCapsule_GetPointer(c, WORLD);
    WITHOUT_LOCK(ep_world_release(w));
}
static PyObject *world_capsule(EpWorld *w) {
    PyObject *c = PyCapsule_New(w, WORLD, free_world);
    if (!c) WITHOUT_LOCK(ep_world_release(w));
    return c;
}

FAST(world_listen) {
    unsigned char name[EP_NAME_BYTES], nonce[EP_NONCE_BYTES];
    int fd;
    WANT(0);
    int code = ep_world_listen(&fd, name, nonce);
    if (code) return ep_raise(code);
    return Py_BuildValue("iy#y#", fd, name, (Py_ssize_t)sizeof name, nonce, (Py_ssize_t)sizeof nonce);
}

FAST(world_unlisten) {
    int fd;
    WANT(1);
    if (!ep_get_int(args[0], &fd)) return NULL;
    ep_world_unlisten(fd);
    return ep_done(0);
}

/* (rank, num_ranks, timeout_s, listen_fd, nonce, names) */
FAST(world_create) {
    EpWorldConfig c = {0};
    EpWorld *w = NULL;
    int code;
    WANT(6);
    if (!ep_get_u32(args[0], &c.rank) || !ep_get_u32(args[1], &c.num_ranks) ||
        !ep_get_double(args[2], &c.timeout_s) || !ep_get_int(args[3], &c.listen_fd) ||
        !ep_get_bytes(args[4], c.nonce, sizeof c.nonce))
        return NULL;
    if (c.num_ranks < 1 || c.num_ranks > EP_MAX_RANKS)
        return PyErr_Format(PyExc_ValueError, "a world has 1 to %u ranks, not %u", EP_MAX_RANKS, c.num_ranks);
    if (!ep_get_bytes(args[5], c.names, (Py_ssize_t)c.num_ranks * EP_NAME_BYTES)) return NULL;
    WITHOUT_LOCK(code = ep_world_create(&c, &w));
    return code ? ep_raise(code) : world_capsule(w);
}

FAST(world_threads) {
    EpWorld *worlds[EP_MAX_RANKS];
    uint32_t n;
    double timeout_s;
    WANT(2);
    if (!ep_get_u32(args[0], &n) || !ep_get_double(args[1], &timeout_s)) return NULL;
    if (n < 1 || n > EP_MAX_RANKS)
        return PyErr_Format(PyExc_ValueError, "a world has 1 to %u ranks, not %u", EP_MAX_RANKS, n);
    int code = ep_world_create_threads(n, timeout_s, worlds);
    if (code) return ep_raise(code);
    PyObject *list = PyList_New(n);
    for (uint32_t i = 0; i < n; i++) {
        PyObject *c = list ? world_capsule(worlds[i]) : NULL;
        if (c) PyList_SetItem(list, i, c);
        else if (list) Py_CLEAR(list);
        else WITHOUT_LOCK(ep_world_release(worlds[i]));
    }
    return list;
}

FAST(world_check) {
    WANT(1);
    EpWorld *w = (EpWorld *)ep_get_object(args[0], WORLD);
    return w ? ep_done(ep_world_check(w)) : NULL;
}

FAST(world_check_handler) {
    WANT(0);
    return ep_done(ep_world_check_handler());
}

FAST(world_set_waiting) {
    WANT(1);
    const int is_waiting = PyObject_IsTrue(args[0]);
    return is_waiting < 0 ? NULL : PyBool_FromLong(ep_world_set_waiting(is_waiting == 1));
}

/* None while the world has not ended, otherwise (code, text). */
FAST(world_reason) {
    char text[EP_END_BYTES];
    WANT(1);
    EpWorld *w = (EpWorld *)ep_get_object(args[0], WORLD);
    if (!w) return NULL;
    int code = ep_world_reason(w, text);
    if (!code) Py_RETURN_NONE;
    PyObject *decoded = PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
    return decoded ? Py_BuildValue("iN", code, decoded) : NULL;
}

/* (world, code, text): end the world because of an event on another node. */
FAST(world_abort) {
    int code;
    WANT(3);
    EpWorld *w = (EpWorld *)ep_get_object(args[0], WORLD);
    if (!w || !ep_get_int(args[1], &code)) return NULL;
    const char *text = PyUnicode_Check(args[2]) ? PyUnicode_AsUTF8AndSize(args[2], NULL) : NULL;
    if (!text) return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_TypeError, "the reason must be a str");
    if (code >= 0) return PyErr_Format(PyExc_ValueError, "code %d: must be negative, an EpCode", code);
    WITHOUT_LOCK(ep_world_abort(w, code, EP_NO_RANK, text));
    Py_RETURN_NONE;
}

/* (world, node, first_rank) */
FAST(world_set_place) {
    uint32_t node, first_rank;
    WANT(3);
    EpWorld *w = (EpWorld *)ep_get_object(args[0], WORLD);
    if (!w || !ep_get_u32(args[1], &node) || !ep_get_u32(args[2], &first_rank)) return NULL;
    ep_world_set_place(w, node, first_rank);
    Py_RETURN_NONE;
}

FAST(world_lost_ranks) {
    WANT(1);
    EpWorld *w = (EpWorld *)ep_get_object(args[0], WORLD);
    return w ? PyLong_FromUnsignedLong(ep_world_lost_ranks(w)) : NULL;
}

FAST(world_set_timeout) {
    double timeout_s;
    WANT(2);
    EpWorld *w = (EpWorld *)ep_get_object(args[0], WORLD);
    return w && ep_get_double(args[1], &timeout_s) ? ep_done(ep_world_set_timeout(w, timeout_s)) : NULL;
}

FAST(world_close) {
    int code;
    WANT(2);
    EpWorld *w = (EpWorld *)ep_get_object(args[0], WORLD);
    if (!w) return NULL;
    int collective = PyObject_IsTrue(args[1]);
    if (collective < 0) return NULL;
    WITHOUT_LOCK(code = ep_world_close(w, collective == 1));
    return ep_done(code);
}

FAST(worlds_settle) {
    WANT(0);
    (void)args;
    WITHOUT_LOCK(ep_world_settle_all());
    return ep_done(0);
}

FAST(world_flight_record) {
    char page[EP_PAGE_BYTES];
    int code;
    WANT(1);
    EpWorld *w = (EpWorld *)ep_get_object(args[0], WORLD);
    if (!w) return NULL;
    WITHOUT_LOCK(code = ep_world_flight_record(w, page));
    return code ? ep_raise(code) : PyUnicode_DecodeUTF8(page, (Py_ssize_t)strlen(page), "replace");
}

FAST(world_all_gather) {
    char *mine;
    Py_ssize_t n;
    int code;
    unsigned char all[EP_MAX_RANKS * EP_ALL_GATHER_BYTES];
    WANT(2);
    EpWorld *w = (EpWorld *)ep_get_object(args[0], WORLD);
    if (!w || PyBytes_AsStringAndSize(args[1], &mine, &n)) return NULL;
    if (n > EP_ALL_GATHER_BYTES)
        return PyErr_Format(PyExc_ValueError, "an exchange carries at most %u bytes, not %zd",
                            EP_ALL_GATHER_BYTES, n);
    WITHOUT_LOCK(code = ep_world_all_gather(w, mine, (uint32_t)n, all));
    return code ? ep_raise(code)
                : PyBytes_FromStringAndSize((const char *)all, n * (Py_ssize_t)ep_world_size(w));
}

/* (world, code) */
FAST(world_propagate_error) {
    int why, code;
    WANT(2);
    EpWorld *w = (EpWorld *)ep_get_object(args[0], WORLD);
    if (!w || !ep_get_int(args[1], &why)) return NULL;
    WITHOUT_LOCK(code = ep_world_propagate_error(w, why));
    return ep_done(code);
}

PyMethodDef ep_world_methods[] = {
    METHOD(world_listen),        METHOD(world_unlisten),    METHOD(world_create),
    METHOD(world_threads),       METHOD(world_check),       METHOD(world_lost_ranks),
    METHOD(world_set_timeout),   METHOD(world_close),       METHOD(worlds_settle),
    METHOD(world_flight_record), METHOD(world_all_gather),  METHOD(world_propagate_error),
    METHOD(world_reason),        METHOD(world_abort),       METHOD(world_set_place),
    METHOD(world_check_handler), METHOD(world_set_waiting), {NULL, NULL, 0, NULL}};
