/* A call whose launch is known: one look at its tensors, memory for its outputs, the launch.
 *
 * What generated functions do in Python for any call, for calls like an earlier one, without an
 * interpreter between the steps. It knows no more of PyTorch than Python does: each step is a call
 * of what PyTorch offers there. Where this extension was not built, calls go the general way.
 *
 *   ready = Ready(check, given, launch, stream, device, outputs, data_ptr, is_grad_enabled, alignment)
 *   made = ready(x, None, 1e-6)     a tensor, a tuple of tensors, or None: go the general way
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <stddef.h>

enum { kMaxArguments = 64 }; /* of a call, and of its launch */

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *check;           /* whether tensors that are given are like the earlier call's */
    PyObject *given;           /* tuple: of each input, whether it is given */
    PyObject *launch;          /* (stream, *input pointers, *output pointers, *scalars) */
    PyObject *stream;          /* of a device */
    PyObject *device;          /* int */
    PyObject *outputs;         /* tuple: what makes each, or None */
    PyObject *data_ptr;        /* of a tensor */
    PyObject *is_grad_enabled; /* () */
    unsigned long long below_alignment;
    PyObject *requires_grad, *zero; /* a name, and an address that is none */
    Py_ssize_t made;                /* outputs that there are */
} Ready;

/* Arguments of a call on their way, with a free place before them as a vectorcall may ask for. */
typedef struct {
    PyObject *place[kMaxArguments + 1];
    Py_ssize_t count;
} Arguments;

static inline void push(Arguments *arguments, PyObject *owned) {
    arguments->place[++arguments->count] = owned;
}

static void release(Arguments *arguments) {
    for (Py_ssize_t i = 1; i <= arguments->count; ++i) Py_DECREF(arguments->place[i]);
}

static inline PyObject *call(PyObject *function, Arguments *arguments) {
    return PyObject_Vectorcall(function, arguments->place + 1,
                               (size_t)arguments->count | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
}

/* 1, 0, or -1 with an error set. */
static inline int truth(PyObject *answer) {
    if (answer == NULL)
        return -1;
    const int is_true = answer == Py_True ? 1 : answer == Py_False ? 0 : PyObject_IsTrue(answer);
    Py_DECREF(answer);
    return is_true;
}

static int like_before(Ready *self, PyObject *const *tensors, Py_ssize_t count) {
    PyObject *looked_at[kMaxArguments + 1];
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

static int wants_gradients(Ready *self, PyObject *const *tensors, Py_ssize_t count) {
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

static inline PyObject *address_of(Ready *self, PyObject *tensor) {
    if (tensor == Py_None)
        return Py_NewRef(self->zero);
    return PyObject_CallOneArg(self->data_ptr, tensor);
}

/* Push the addresses of a call's inputs. 1, 0 if one is not aligned, or -1 with an error set. */
static int push_inputs(Ready *self, Arguments *arguments, PyObject *const *tensors,
                       Py_ssize_t count) {
    for (Py_ssize_t i = 0; i < count; ++i) {
        PyObject *address = address_of(self, tensors[i]);
        if (address == NULL)
            return -1;
        push(arguments, address);
        const unsigned long long bits = PyLong_AsUnsignedLongLong(address);
        if (bits == ~0ull && PyErr_Occurred())
            return -1;
        if (bits & self->below_alignment)
            return 0;
    }
    return 1;
}

/* Make the outputs, and push their addresses. `found`: the one output, or a tuple to fill. */
static int push_outputs(Ready *self, Arguments *arguments, PyObject **found) {
    const Py_ssize_t count = PyTuple_GET_SIZE(self->outputs);
    Py_ssize_t filled = 0;
    if (self->made != 1 && (*found = PyTuple_New(self->made)) == NULL)
        return -1;
    for (Py_ssize_t i = 0; i < count; ++i) {
        PyObject *make = PyTuple_GET_ITEM(self->outputs, i);
        if (make == Py_None) {
            push(arguments, Py_NewRef(self->zero));
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
        push(arguments, address);
    }
    return 0;
}

static PyObject *ready_call(PyObject *callable, PyObject *const *given, size_t flagged,
                            PyObject *keywords) {
    Ready *self = (Ready *)callable;
    const Py_ssize_t count = PyVectorcall_NARGS(flagged);
    const Py_ssize_t inputs = PyTuple_GET_SIZE(self->given);
    const Py_ssize_t outputs = PyTuple_GET_SIZE(self->outputs);
    if (count < inputs || count + outputs >= kMaxArguments ||
        (keywords && PyTuple_GET_SIZE(keywords))) {
        PyErr_Format(PyExc_TypeError,
                     "a call that is ready takes %zd tensors and less than %zd scalars by position, "
                     "got %zd arguments", inputs, kMaxArguments - inputs - outputs, count);
        return NULL;
    }
    int go = like_before(self, given, inputs);
    if (go > 0) {
        const int recorded = wants_gradients(self, given, inputs);
        go = recorded < 0 ? -1 : !recorded;
    }
    if (go < 0)
        return NULL;
    if (go == 0)
        Py_RETURN_NONE;

    Arguments arguments = {.count = 0};
    PyObject *found = NULL, *done = NULL;
    PyObject *stream = PyObject_CallOneArg(self->stream, self->device);
    if (stream == NULL)
        return NULL;
    push(&arguments, stream);
    go = push_inputs(self, &arguments, given, inputs);
    if (go > 0 && (go = push_outputs(self, &arguments, &found)) == 0) {
        for (Py_ssize_t i = inputs; i < count; ++i) push(&arguments, Py_NewRef(given[i]));
        done = call(self->launch, &arguments);
        go = done == NULL ? -1 : 1;
    }
    Py_XDECREF(done);
    release(&arguments);
    if (go > 0)
        return found;
    Py_XDECREF(found);
    if (go < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *ready_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    static char *names[] = {"check", "given", "launch", "stream", "device", "outputs",
                            "data_ptr", "is_grad_enabled", "alignment", NULL};
    PyObject *check, *given, *launch, *stream, *device, *outputs, *data_ptr, *is_grad_enabled;
    unsigned long long alignment;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OO!OOO!O!OOK:Ready", names, &check,
                                     &PyTuple_Type, &given, &launch, &stream, &PyLong_Type, &device,
                                     &PyTuple_Type, &outputs, &data_ptr, &is_grad_enabled,
                                     &alignment))
        return NULL;
    if (alignment == 0 || (alignment & (alignment - 1)) != 0) {
        PyErr_Format(PyExc_ValueError, "alignment must be a power of two, got %llu", alignment);
        return NULL;
    }
    if (PyTuple_GET_SIZE(given) + PyTuple_GET_SIZE(outputs) >= kMaxArguments) {
        PyErr_Format(PyExc_ValueError, "%zd inputs and %zd outputs are more than %d tensors",
                     PyTuple_GET_SIZE(given), PyTuple_GET_SIZE(outputs), kMaxArguments - 1);
        return NULL;
    }
    Ready *self = (Ready *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->vectorcall = ready_call;
    self->check = Py_NewRef(check);
    self->given = Py_NewRef(given);
    self->launch = Py_NewRef(launch);
    self->stream = Py_NewRef(stream);
    self->device = Py_NewRef(device);
    self->outputs = Py_NewRef(outputs);
    self->data_ptr = Py_NewRef(data_ptr);
    self->is_grad_enabled = Py_NewRef(is_grad_enabled);
    self->below_alignment = alignment - 1;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(outputs); ++i)
        self->made += PyTuple_GET_ITEM(outputs, i) != Py_None;
    self->requires_grad = PyUnicode_InternFromString("requires_grad");
    self->zero = PyLong_FromLong(0);
    if (self->requires_grad == NULL || self->zero == NULL) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static int ready_traverse(PyObject *object, visitproc visit, void *arg) {
    Ready *self = (Ready *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->check);
    Py_VISIT(self->given);
    Py_VISIT(self->launch);
    Py_VISIT(self->stream);
    Py_VISIT(self->outputs);
    Py_VISIT(self->data_ptr);
    Py_VISIT(self->is_grad_enabled);
    return 0;
}

static int ready_clear(PyObject *object) {
    Ready *self = (Ready *)object;
    Py_CLEAR(self->check);
    Py_CLEAR(self->given);
    Py_CLEAR(self->launch);
    Py_CLEAR(self->stream);
    Py_CLEAR(self->device);
    Py_CLEAR(self->outputs);
    Py_CLEAR(self->is_grad_enabled);
    Py_CLEAR(self->data_ptr);
    Py_CLEAR(self->requires_grad);
    Py_CLEAR(self->zero);
    return 0;
}

static void ready_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    ready_clear(object);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyMemberDef ready_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Ready, vectorcall), READONLY, NULL},
    {"check", T_OBJECT_EX, offsetof(Ready, check), READONLY, "What looks at the tensors."},
    {NULL, 0, 0, 0, NULL},
};

PyDoc_STRVAR(ready_doc,
             "Ready(check, given, launch, stream, device, outputs, data_ptr, is_grad_enabled, "
             "alignment)\n--\n\nA call whose launch is known, called as ready(*tensors, *scalars).");

static PyType_Slot ready_slots[] = {
    {Py_tp_doc, (void *)ready_doc},    {Py_tp_new, ready_new},
    {Py_tp_dealloc, ready_dealloc},    {Py_tp_traverse, ready_traverse},
    {Py_tp_clear, ready_clear},        {Py_tp_call, PyVectorcall_Call},
    {Py_tp_members, ready_members},    {0, NULL},
};

static PyType_Spec ready_spec = {
    .name = "_ready.Ready",
    .basicsize = sizeof(Ready),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL |
             Py_TPFLAGS_IMMUTABLETYPE,
    .slots = ready_slots,
};

static int module_exec(PyObject *module) {
    PyObject *type = PyType_FromModuleAndSpec(module, &ready_spec, NULL);
    if (type == NULL)
        return -1;
    const int failed = PyModule_AddObjectRef(module, "Ready", type);
    Py_DECREF(type);
    return failed;
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
#ifdef Py_mod_gil
    {Py_mod_gil, Py_MOD_GIL_NOT_USED}, /* a Ready never changes; a call lives on its stack */
#endif
    {0, NULL},
};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_ready",
    .m_doc = "Calls whose launches are known.",
    .m_methods = NULL,
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__ready(void) { return PyModuleDef_Init(&module_definition); }
