/* The fast path: one check of all tensors, allocation of the outputs, the launches.
 *
 * It serves calls whose shapes, strides, dtypes and alignment were seen before, and does what the
 * generated functions do in Python for any call, without the interpreter between the steps. It uses
 * PyTorch only through Python objects. If this extension was not built, calls take the general path.
 *
 *   path = FastPath(check, given, launches, scalars, stream, device, current_device, outputs, scratch,
 *                 data_ptr, is_grad_enabled, alignment, result)
 *   made = path(x, None, 1e-6)      a tensor, a `result` of tensors, or None: take the general path
 *
 * `result` is `tuple`, or a subclass as `collections.namedtuple` makes it, without a state of its own.
 *
 * A launch is (launcher, arguments, slots). Each byte of slots is the index of the call's value that
 * the argument is, or 255 for a constant argument. The values are the stream, the addresses of
 * inputs, outputs and scratch, and the scalars.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <stddef.h>

enum { kMaxValues = 64, kMaxArguments = 132, kConstant = 255 }; /* arguments: of a launch */

typedef struct {
    PyObject *launcher;
    PyObject *arguments; /* tuple; what a slot is for is None */
    PyObject *slots;     /* bytes, one per argument */
} Launch;

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *check;           /* PyTorch's check of all given tensors */
    PyObject *given;           /* tuple: whether each input is given */
    PyObject *launches;        /* tuple of the tuples that `launch` was read from */
    Launch *launch;            /* borrows from it */
    PyObject *stream;          /* of a device */
    PyObject *device;          /* int */
    PyObject *current_device;  /* (), or None where there is one device alone */
    PyObject *outputs;         /* tuple: an allocator of each, or None */
    PyObject *scratch;         /* tuple: an allocator of each */
    PyObject *data_ptr;        /* of a tensor */
    PyObject *is_grad_enabled; /* () */
    PyTypeObject *result;      /* of several outputs */
    unsigned long long below_alignment;
    PyObject *requires_grad, *zero; /* a name, and an address that is none */
    Py_ssize_t made;                /* number of present outputs */
    Py_ssize_t inputs, scalars;     /* how many */
    Py_ssize_t launch_count;
    Py_ssize_t served; /* number of calls that this path has served */
} FastPath;

/* The values of the slots, and the scratch tensors, which must live until all launches are queued. */
typedef struct {
    PyObject *place[2 * kMaxValues];
    Py_ssize_t count, extra;
} Values;

static inline void push(Values *values, PyObject *owned) { values->place[values->count++] = owned; }

static inline void keep(Values *values, PyObject *owned) {
    values->place[kMaxValues + values->extra++] = owned;
}

static void release(Values *values) {
    for (Py_ssize_t i = 0; i < values->count; ++i) Py_DECREF(values->place[i]);
    for (Py_ssize_t i = 0; i < values->extra; ++i) Py_DECREF(values->place[kMaxValues + i]);
}

/* 0, or -1 with an error set. */
static int do_launch(const Launch *launch, const Values *values) {
    PyObject *arguments[kMaxArguments + 1]; /* a free place before them, as a vectorcall may ask for */
    const Py_ssize_t count = PyTuple_GET_SIZE(launch->arguments);
    const unsigned char *slots = (const unsigned char *)PyBytes_AS_STRING(launch->slots);
    for (Py_ssize_t i = 0; i < count; ++i)
        arguments[1 + i] = slots[i] == kConstant ? PyTuple_GET_ITEM(launch->arguments, i)
                                                 : values->place[slots[i]];
    PyObject *done = PyObject_Vectorcall(launch->launcher, arguments + 1,
                                         (size_t)count | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* 1, 0, or -1 with an error set. */
static inline int truth(PyObject *answer) {
    if (answer == NULL)
        return -1;
    const int is_true = answer == Py_True ? 1 : answer == Py_False ? 0 : PyObject_IsTrue(answer);
    Py_DECREF(answer);
    return is_true;
}

static int like_before(FastPath *self, PyObject *const *tensors, Py_ssize_t count) {
    PyObject *looked_at[kMaxValues + 1];
    Py_ssize_t found = 0;
    for (Py_ssize_t i = 0; i < count; ++i) {
        if ((tensors[i] != Py_None) != (PyTuple_GET_ITEM(self->given, i) == Py_True))
            return 0;
        if (tensors[i] != Py_None)
            looked_at[++found] = tensors[i];
    }
    return truth(PyObject_Vectorcall(self->check, looked_at + 1,
                                     (size_t)found | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL));
}

static int wants_gradients(FastPath *self, PyObject *const *tensors, Py_ssize_t count) {
    const int enabled = truth(PyObject_CallNoArgs(self->is_grad_enabled));
    if (enabled <= 0)
        return enabled;
    for (Py_ssize_t i = 0; i < count; ++i) {
        if (tensors[i] == Py_None)
            continue;
        const int wants = truth(PyObject_GetAttr(tensors[i], self->requires_grad));
        if (wants != 0)
            return wants;
    }
    return 0;
}

static inline PyObject *address_of(FastPath *self, PyObject *tensor) {
    if (tensor == Py_None)
        return Py_NewRef(self->zero);
    return PyObject_CallOneArg(self->data_ptr, tensor);
}

/* Push the addresses of a call's inputs. 1, 0 if one is not aligned
 * or has no memory, or -1 with an error set. */
static int push_inputs(FastPath *self, Values *values, PyObject *const *tensors,
                       Py_ssize_t count) {
    for (Py_ssize_t i = 0; i < count; ++i) {
        PyObject *address = address_of(self, tensors[i]);
        if (address == NULL)
            return -1;
        push(values, address);
        const unsigned long long bits = PyLong_AsUnsignedLongLong(address);
        if (bits == ~0ull && PyErr_Occurred())
            return -1;
        if ((bits & self->below_alignment) || (bits == 0 && tensors[i] != Py_None))
            return 0; /* the general path says why a tensor without memory is refused */
    }
    return 1;
}

/* Make the outputs, and push their addresses. `found`: the one output, or a tuple to fill. */
static int push_outputs(FastPath *self, Values *values, PyObject **found) {
    const Py_ssize_t count = PyTuple_GET_SIZE(self->outputs);
    Py_ssize_t filled = 0;
    if (self->made != 1 && (*found = self->result->tp_alloc(self->result, self->made)) == NULL)
        return -1;
    for (Py_ssize_t i = 0; i < count; ++i) {
        PyObject *make = PyTuple_GET_ITEM(self->outputs, i);
        if (make == Py_None) {
            push(values, Py_NewRef(self->zero));
            continue;
        }
        PyObject *output = PyObject_CallNoArgs(make);
        if (output == NULL)
            return -1;
        if (self->made == 1)
            *found = output;
        else
            PyTuple_SET_ITEM(*found, filled++, output);
        PyObject *address = address_of(self, output);
        if (address == NULL)
            return -1;
        push(values, address);
    }
    return 0;
}

static int push_scratch(FastPath *self, Values *values) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(self->scratch); ++i) {
        PyObject *made = PyObject_CallNoArgs(PyTuple_GET_ITEM(self->scratch, i));
        if (made == NULL)
            return -1;
        keep(values, made);
        PyObject *address = address_of(self, made);
        if (address == NULL)
            return -1;
        push(values, address);
    }
    return 0;
}

/* Whether the device is current: allocations and launches go to the current device. */
static int is_current(FastPath *self) {
    if (self->current_device == Py_None)
        return 1;
    PyObject *current = PyObject_CallNoArgs(self->current_device);
    if (current == NULL)
        return -1;
    const int same = PyObject_RichCompareBool(current, self->device, Py_EQ);
    Py_DECREF(current);
    return same;
}

static PyObject *ready_call(PyObject *callable, PyObject *const *given, size_t flagged,
                            PyObject *keywords) {
    FastPath *self = (FastPath *)callable;
    const Py_ssize_t count = PyVectorcall_NARGS(flagged);
    const Py_ssize_t inputs = self->inputs;
    if (count != inputs + self->scalars || (keywords && PyTuple_GET_SIZE(keywords))) {
        PyErr_Format(PyExc_TypeError,
                     "the fast path takes %zd tensors and %zd scalars by position, got %zd "
                     "arguments", inputs, self->scalars, count);
        return NULL;
    }
    int go = like_before(self, given, inputs);
    if (go > 0) {
        const int recorded = wants_gradients(self, given, inputs);
        go = recorded < 0 ? -1 : !recorded;
    }
    if (go > 0)
        go = is_current(self);
    if (go < 0)
        return NULL;
    if (go == 0)
        Py_RETURN_NONE;

    Values values = {.count = 0, .extra = 0};
    PyObject *found = NULL;
    PyObject *stream = PyObject_CallOneArg(self->stream, self->device);
    if (stream == NULL)
        return NULL;
    push(&values, stream);
    go = push_inputs(self, &values, given, inputs);
    if (go > 0) {
        go = push_outputs(self, &values, &found);
        if (go == 0)
            go = push_scratch(self, &values);
        for (Py_ssize_t i = inputs; i < count; ++i) push(&values, Py_NewRef(given[i]));
        for (Py_ssize_t i = 0; go == 0 && i < self->launch_count; ++i)
            go = do_launch(&self->launch[i], &values);
        go = go == 0 ? 1 : -1;
    }
    release(&values);
    if (go > 0) {
        ++self->served;
        return found;
    }
    Py_XDECREF(found);
    if (go < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* Read and check the launches; calls do not check them again. 0, or -1 with an error set. */
static int read_launches(FastPath *self, PyObject *launches, Py_ssize_t values) {
    const Py_ssize_t count = PyTuple_GET_SIZE(launches);
    self->launches = Py_NewRef(launches);
    self->launch = PyMem_Calloc((size_t)count + 1, sizeof(Launch));
    if (self->launch == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; ++i) {
        Launch *launch = &self->launch[i];
        PyObject *item = PyTuple_GET_ITEM(launches, i);
        if (!PyTuple_Check(item)) {
            PyErr_Format(PyExc_TypeError, "launch %zd must be a tuple, got %R", i, item);
            return -1;
        }
        if (!PyArg_ParseTuple(item, "OO!O!;a launch is (launcher, arguments, slots)",
                              &launch->launcher, &PyTuple_Type, &launch->arguments, &PyBytes_Type,
                              &launch->slots))
            return -1;
        const Py_ssize_t arguments = PyTuple_GET_SIZE(launch->arguments);
        if (arguments != PyBytes_GET_SIZE(launch->slots) || arguments > kMaxArguments) {
            PyErr_Format(PyExc_ValueError,
                         "launch %zd has %zd arguments and %zd slots; both must be as many, and %d "
                         "at most", i, arguments, PyBytes_GET_SIZE(launch->slots), kMaxArguments);
            return -1;
        }
        for (Py_ssize_t j = 0; j < arguments; ++j) {
            const int slot = (unsigned char)PyBytes_AS_STRING(launch->slots)[j];
            if (slot != kConstant && slot >= values) {
                PyErr_Format(PyExc_ValueError,
                             "launch %zd: argument %zd is of slot %d, and a call has %zd values", i, j,
                             slot, values);
                return -1;
            }
        }
    }
    self->launch_count = count;
    return 0;
}

static PyObject *ready_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    static char *names[] = {"check", "given", "launches", "scalars", "stream", "device",
                            "current_device", "outputs", "scratch", "data_ptr", "is_grad_enabled",
                            "alignment", "result", NULL};
    PyObject *check, *given, *launches, *stream, *device, *current_device, *outputs, *scratch;
    PyObject *data_ptr, *is_grad_enabled, *result;
    Py_ssize_t scalars;
    unsigned long long alignment;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OO!O!nOO!OO!O!OOKO!:FastPath", names, &check,
                                     &PyTuple_Type, &given, &PyTuple_Type, &launches, &scalars,
                                     &stream, &PyLong_Type, &device, &current_device, &PyTuple_Type,
                                     &outputs, &PyTuple_Type, &scratch, &data_ptr, &is_grad_enabled,
                                     &alignment, &PyType_Type, &result))
        return NULL;
    /* Its items are filled in without its own __new__, so it must not have more than items. */
    PyTypeObject *shape = (PyTypeObject *)result;
    if (!PyType_IsSubtype(shape, &PyTuple_Type) ||
        shape->tp_basicsize != PyTuple_Type.tp_basicsize) {
        PyErr_Format(PyExc_TypeError, "result must be tuple or a named tuple, got %R", result);
        return NULL;
    }
    if (alignment == 0 || (alignment & (alignment - 1)) != 0) {
        PyErr_Format(PyExc_ValueError, "alignment must be a power of two, got %llu", alignment);
        return NULL;
    }
    const Py_ssize_t inputs = PyTuple_GET_SIZE(given), tensors = inputs + PyTuple_GET_SIZE(outputs);
    const Py_ssize_t values = 1 + tensors + PyTuple_GET_SIZE(scratch) + scalars;
    if (scalars < 0 || values > kMaxValues) {
        PyErr_Format(PyExc_ValueError,
                     "%zd inputs, %zd outputs, %zd workspaces and %zd scalars; %d together are allowed",
                     inputs, PyTuple_GET_SIZE(outputs), PyTuple_GET_SIZE(scratch), scalars,
                     kMaxValues - 1);
        return NULL;
    }
    FastPath *self = (FastPath *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->vectorcall = ready_call;
    self->check = Py_NewRef(check);
    self->given = Py_NewRef(given);
    self->stream = Py_NewRef(stream);
    self->device = Py_NewRef(device);
    self->current_device = Py_NewRef(current_device);
    self->outputs = Py_NewRef(outputs);
    self->scratch = Py_NewRef(scratch);
    self->data_ptr = Py_NewRef(data_ptr);
    self->is_grad_enabled = Py_NewRef(is_grad_enabled);
    self->result = (PyTypeObject *)Py_NewRef(result);
    self->below_alignment = alignment - 1;
    self->inputs = inputs;
    self->scalars = scalars;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(outputs); ++i)
        self->made += PyTuple_GET_ITEM(outputs, i) != Py_None;
    self->requires_grad = PyUnicode_InternFromString("requires_grad");
    self->zero = PyLong_FromLong(0);
    if (self->requires_grad == NULL || self->zero == NULL ||
        read_launches(self, launches, values) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static int ready_traverse(PyObject *object, visitproc visit, void *arg) {
    FastPath *self = (FastPath *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->check);
    Py_VISIT(self->given);
    Py_VISIT(self->launches);
    Py_VISIT(self->stream);
    Py_VISIT(self->current_device);
    Py_VISIT(self->outputs);
    Py_VISIT(self->scratch);
    Py_VISIT(self->data_ptr);
    Py_VISIT(self->is_grad_enabled);
    Py_VISIT(self->result);
    return 0;
}

static int ready_clear(PyObject *object) {
    FastPath *self = (FastPath *)object;
    Py_CLEAR(self->check);
    Py_CLEAR(self->given);
    self->launch_count = 0;
    Py_CLEAR(self->launches);
    Py_CLEAR(self->stream);
    Py_CLEAR(self->device);
    Py_CLEAR(self->current_device);
    Py_CLEAR(self->outputs);
    Py_CLEAR(self->scratch);
    Py_CLEAR(self->is_grad_enabled);
    Py_CLEAR(self->result);
    Py_CLEAR(self->data_ptr);
    Py_CLEAR(self->requires_grad);
    Py_CLEAR(self->zero);
    return 0;
}

static void ready_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    ready_clear(object);
    PyMem_Free(((FastPath *)object)->launch);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyMemberDef ready_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(FastPath, vectorcall), READONLY, NULL},
    {"check", T_OBJECT_EX, offsetof(FastPath, check), READONLY, "What looks at the tensors."},
    {"served", T_PYSSIZET, offsetof(FastPath, served), READONLY, "Number of calls served."},
    {NULL, 0, 0, 0, NULL},
};

PyDoc_STRVAR(ready_doc,
             "FastPath(check, given, launches, scalars, stream, device, current_device, outputs, scratch, "
             "data_ptr, is_grad_enabled, alignment, result)\n--\n\n"
             "The launches of a call whose layouts were seen before: path(*tensors, *scalars).");

static PyType_Slot ready_slots[] = {
    {Py_tp_doc, (void *)ready_doc},    {Py_tp_new, ready_new},
    {Py_tp_dealloc, ready_dealloc},    {Py_tp_traverse, ready_traverse},
    {Py_tp_clear, ready_clear},        {Py_tp_call, PyVectorcall_Call},
    {Py_tp_members, ready_members},    {0, NULL},
};

static PyType_Spec ready_spec = {
    .name = "_fast_path.FastPath",
    .basicsize = sizeof(FastPath),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL |
             Py_TPFLAGS_IMMUTABLETYPE,
    .slots = ready_slots,
};

static int module_exec(PyObject *module) {
    PyObject *type = PyType_FromModuleAndSpec(module, &ready_spec, NULL);
    if (type == NULL)
        return -1;
    const int failed = PyModule_AddObjectRef(module, "FastPath", type);
    Py_DECREF(type);
    return failed;
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
#ifdef Py_mod_gil
    {Py_mod_gil, Py_MOD_GIL_NOT_USED}, /* a FastPath never changes; a call lives on its stack */
#endif
    {0, NULL},
};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_fast_path",
    .m_doc = "Calls whose launches are known.",
    .m_methods = NULL,
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__fast_path(void) { return PyModuleDef_Init(&module_definition); }
