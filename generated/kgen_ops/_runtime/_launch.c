/* A kernel launch for 0.2 us of host time: Python ints and floats in, one cuLaunchKernel out, or one
 * cuLaunchKernelEx for programmatic dependent launch.
 *
 * This file includes no CUDA or torch header, so it compiles wherever Python.h is. It loads the
 * driver at run time and declares the needed part of its interface here. PythonLauncher in
 * launcher.py has the same behaviour and the same messages.
 *
 *   launcher = Launcher(function, "pqf", (256, 1, 1), smem, name, context, CudaError)
 *   launcher(stream, grid_x, grid_y, grid_z, pointer, count, scale)
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <dlfcn.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* --- the driver ---------------------------------------------------------------------------- */

typedef int (*LaunchKernelFn)(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                              unsigned block_x, unsigned block_y, unsigned block_z, unsigned smem,
                              void *stream, void **params, void **extra);
/* CUlaunchAttribute and CUlaunchConfig. */
typedef struct {
    int kind;
    char padding[4];
    union {
        char bytes[64];
        int on;
    } value;
} LaunchAttribute;
typedef struct {
    unsigned grid[3], block[3], smem;
    void *stream;
    LaunchAttribute *attributes;
    unsigned attribute_count;
} LaunchConfig;
typedef int (*LaunchKernelExFn)(const LaunchConfig *config, void *function, void **params,
                                void **extra);
typedef int (*GetErrorTextFn)(int code, const char **text);
typedef int (*CtxGetCurrentFn)(void **context);
typedef int (*CtxSetCurrentFn)(void *context);

enum { kInvalidContext = 201, kInvalidHandle = 400 };
enum { kCooperative = 2, kProgrammaticStreamSerialization = 6 }; /* CUlaunchAttributeID */

/* One driver per process, whatever the number of interpreters. launch_kernel is written last. */
static struct {
    LaunchKernelFn launch_kernel;
    LaunchKernelExFn launch_kernel_ex; /* NULL before CUDA 11.8 */
    GetErrorTextFn error_name;
    GetErrorTextFn error_string;
    CtxGetCurrentFn get_context;
    CtxSetCurrentFn set_context;
} driver;

static int load_driver(const char *path) {
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        PyErr_Format(PyExc_OSError, "cannot load the CUDA driver: %s", dlerror());
        return -1;
    }
    LaunchKernelFn launch_kernel = (LaunchKernelFn)dlsym(library, "cuLaunchKernel");
    if (launch_kernel == NULL) {
        PyErr_Format(PyExc_OSError, "%s has no cuLaunchKernel", path);
        return -1;
    }
    driver.launch_kernel_ex = (LaunchKernelExFn)dlsym(library, "cuLaunchKernelEx");
    driver.error_name = (GetErrorTextFn)dlsym(library, "cuGetErrorName");
    driver.error_string = (GetErrorTextFn)dlsym(library, "cuGetErrorString");
    driver.get_context = (CtxGetCurrentFn)dlsym(library, "cuCtxGetCurrent");
    driver.set_context = (CtxSetCurrentFn)dlsym(library, "cuCtxSetCurrent");
    driver.launch_kernel = launch_kernel;
    return 0;
}

/* --- Launcher ------------------------------------------------------------------------------ */

enum { kMaxArguments = 128, kFixedArguments = 4 };

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    void *function;
    void *context; /* the function's; may be NULL */
    unsigned block[3];
    unsigned smem;
    int pdl; /* programmatic dependent launch */
    int cooperative;
    Py_ssize_t count; /* of kernel arguments */
    char format[kMaxArguments];
    PyObject *name;  /* str, for messages */
    PyObject *error; /* called with (message, code) */
} Launcher;

typedef union {
    void *p;
    long long q;
    int i;
    float f;
    double d;
} Value;

/* An int, or the result of __index__; strong reference. */
static PyObject *as_int(PyObject *object) {
    if (PyLong_Check(object)) {
        Py_INCREF(object);
        return object;
    }
    return PyNumber_Index(object);
}

static int bad_argument(Launcher *self, Py_ssize_t index, PyObject *object) {
    const char *want = "an int";
    switch (self->format[index]) {
    case 'p': want = "an address (int, 0 .. 2**64 - 1)"; break;
    case 'q': want = "an int of 64 bits"; break;
    case 'i': want = "an int of 32 bits"; break;
    case 'f': want = "a float within float32's range"; break;
    case 'd': want = "a float"; break;
    }
    PyObject *kind = PyErr_ExceptionMatches(PyExc_TypeError) ? PyExc_TypeError : PyExc_OverflowError;
    PyErr_Format(kind, "%U: kernel argument %zd must be %s, got %R", self->name, index, want, object);
    return -1;
}

static inline int convert(Launcher *self, Py_ssize_t index, PyObject *object, Value *value) {
    const char code = self->format[index];
    if (code == 'f' || code == 'd') {
        const double number = PyFloat_AsDouble(object);
        if (number == -1.0 && PyErr_Occurred())
            return bad_argument(self, index, object);
        if (code == 'd') {
            value->d = number;
            return 0;
        }
        value->f = (float)number;
        if (isinf(value->f) && !isinf(number)) {
            PyErr_SetNone(PyExc_OverflowError);
            return bad_argument(self, index, object);
        }
        return 0;
    }
    PyObject *integer = as_int(object);
    if (integer == NULL)
        return bad_argument(self, index, object);
    /* All ones is either -1 or the sign of an error; check for an error only then. */
    int suspect;
    if (code == 'p') {
        const unsigned long long address = PyLong_AsUnsignedLongLong(integer);
        value->p = (void *)(uintptr_t)address;
        suspect = address == ~0ull;
    } else {
        const long long wide = PyLong_AsLongLong(integer);
        suspect = wide == -1;
        if (code == 'q') {
            value->q = wide;
        } else {
            value->i = (int)wide;
            if (wide < INT32_MIN || wide > INT32_MAX) {
                PyErr_SetNone(PyExc_OverflowError);
                suspect = 1;
            }
        }
    }
    Py_DECREF(integer);
    return suspect && PyErr_Occurred() ? bad_argument(self, index, object) : 0;
}

static int grid_extent(Launcher *self, PyObject *object, unsigned *extent) {
    const long value = PyLong_AsLong(object);
    if (value == -1 && PyErr_Occurred()) {
        if (PyErr_ExceptionMatches(PyExc_TypeError)) {
            PyErr_Format(PyExc_TypeError, "%U: a grid extent must be an int, got %R", self->name,
                         object);
            return -1;
        }
        PyErr_Clear();
    } else if (value >= 0 && value <= INT32_MAX) {
        *extent = (unsigned)value;
        return 0;
    }
    PyErr_Format(PyExc_ValueError, "%U: a grid extent must be 0 .. 2**31 - 1, got %R", self->name,
                 object);
    return -1;
}

/* Called without the GIL. */
static inline int launch(const Launcher *self, const unsigned *grid, void *stream, void **params) {
    if (!self->pdl && !self->cooperative)
        return driver.launch_kernel(self->function, grid[0], grid[1], grid[2], self->block[0],
                                    self->block[1], self->block[2], self->smem, stream, params,
                                    NULL);
    LaunchAttribute attributes[2];
    unsigned count = 0;
    if (self->cooperative)
        attributes[count++] = (LaunchAttribute){.kind = kCooperative, .value.on = 1};
    if (self->pdl)
        attributes[count++] =
            (LaunchAttribute){.kind = kProgrammaticStreamSerialization, .value.on = 1};
    const LaunchConfig config = {
        .grid = {grid[0], grid[1], grid[2]},
        .block = {self->block[0], self->block[1], self->block[2]},
        .smem = self->smem,
        .stream = stream,
        .attributes = attributes,
        .attribute_count = count,
    };
    return driver.launch_kernel_ex(&config, self->function, params, NULL);
}

/* A thread that torch did not start has no current context; a thread that works on another device
 * has that device's context. The driver refuses both before anything runs, so a retry is safe.
 * Called without the GIL. */
static int retry_in_context(Launcher *self, int code, const unsigned *grid, void *stream,
                            void **params) {
    void *current = NULL;
    if (self->context == NULL || driver.get_context == NULL || driver.set_context == NULL)
        return code;
    if (driver.get_context(&current) != 0 || current == self->context)
        return code;
    const int failed = driver.set_context(self->context);
    if (failed)
        return failed;
    code = launch(self, grid, stream, params);
    if (current != NULL)
        driver.set_context(current);
    return code; /* a thread that had no context keeps this one: its next launch is a fast one */
}

static PyObject *raise_error(Launcher *self, int code, const unsigned *grid) {
    const char *name = NULL, *text = NULL;
    if (driver.error_name == NULL || driver.error_name(code, &name) != 0 || name == NULL)
        name = "CUDA_ERROR_UNKNOWN";
    if (driver.error_string == NULL || driver.error_string(code, &text) != 0 || text == NULL)
        text = "no description";
    PyObject *message = PyUnicode_FromFormat(
        "%U: cuLaunchKernel: %s (%d): %s\n"
        "  grid (%u, %u, %u), block (%u, %u, %u), %u bytes of dynamic shared memory%s%s",
        self->name, name, code, text, grid[0], grid[1], grid[2], self->block[0], self->block[1],
        self->block[2], self->smem, self->pdl ? ", programmatic dependent launch" : "",
        self->cooperative ? ", cooperative launch" : "");
    if (message == NULL)
        return NULL;
    PyObject *error = PyObject_CallFunction(self->error, "Oi", message, code);
    Py_DECREF(message);
    if (error != NULL) {
        PyErr_SetObject((PyObject *)Py_TYPE(error), error);
        Py_DECREF(error);
    }
    return NULL;
}

static PyObject *launcher_call(PyObject *callable, PyObject *const *args, size_t flagged,
                               PyObject *keywords) {
    Launcher *self = (Launcher *)callable;
    const Py_ssize_t given = PyVectorcall_NARGS(flagged);
    Value values[kMaxArguments];
    void *params[kMaxArguments];
    unsigned grid[3];

    if (given != self->count + kFixedArguments || (keywords && PyTuple_GET_SIZE(keywords))) {
        PyErr_Format(PyExc_TypeError,
                     "%U: takes stream, grid_x, grid_y, grid_z and %zd kernel arguments by "
                     "position, got %zd arguments",
                     self->name, self->count, given);
        return NULL;
    }
    void *stream = (void *)(uintptr_t)PyLong_AsUnsignedLongLong(args[0]);
    if (stream == (void *)~(uintptr_t)0 && PyErr_Occurred()) {
        PyErr_Format(PyExc_TypeError, "%U: the stream must be a raw stream handle (int), got %R",
                     self->name, args[0]);
        return NULL;
    }
    for (int axis = 0; axis < 3; ++axis)
        if (grid_extent(self, args[1 + axis], &grid[axis]) < 0)
            return NULL;
    for (Py_ssize_t i = 0; i < self->count; ++i) {
        if (convert(self, i, args[kFixedArguments + i], &values[i]) < 0)
            return NULL;
        params[i] = &values[i];
    }
    if (grid[0] == 0 || grid[1] == 0 || grid[2] == 0)
        Py_RETURN_NONE;

    int code;
    /* A full queue blocks here until the device, or a host callback that needs the GIL, has finished. */
    Py_BEGIN_ALLOW_THREADS
    code = launch(self, grid, stream, params);
    if (code == kInvalidContext || code == kInvalidHandle)
        code = retry_in_context(self, code, grid, stream, params);
    Py_END_ALLOW_THREADS
    if (code != 0)
        return raise_error(self, code, grid);
    Py_RETURN_NONE;
}

static PyObject *launcher_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    static char *names[] = {"function", "format", "block", "smem", "name",
                            "context", "error", "pdl", "cooperative", NULL};
    unsigned long long function, context = 0;
    const char *format;
    Py_ssize_t count;
    long long block[3], smem;
    PyObject *name = NULL, *error = PyExc_RuntimeError;
    int pdl = 0, cooperative = 0;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "Ks#(LLL)L|UKOpp:Launcher", names, &function,
                                     &format, &count, &block[0], &block[1], &block[2], &smem, &name,
                                     &context, &error, &pdl, &cooperative))
        return NULL;
    if (count > kMaxArguments) {
        PyErr_Format(PyExc_ValueError, "format '%s' has %zd arguments; at most %d are supported",
                     format, count, kMaxArguments);
        return NULL;
    }
    for (Py_ssize_t i = 0; i < count; ++i)
        if (strchr("pqifd", format[i]) == NULL || format[i] == '\0') {
            PyErr_Format(PyExc_ValueError,
                         "format '%s': unknown character at %zd\n"
                         "  known: p (address), q (int64), i (int32), f (float32), d (float64)",
                         format, i);
            return NULL;
        }
    for (int axis = 0; axis < 3; ++axis)
        if (block[axis] < 1 || block[axis] > 1024) {
            PyErr_Format(PyExc_ValueError, "block must be 1 .. 1024 in each direction, got (%lld, "
                         "%lld, %lld)", block[0], block[1], block[2]);
            return NULL;
        }
    if (smem < 0 || smem > INT32_MAX) {
        PyErr_Format(PyExc_ValueError, "smem must be 0 .. 2**31 - 1 bytes, got %lld", smem);
        return NULL;
    }
    if (driver.launch_kernel == NULL && load_driver("libcuda.so.1") < 0)
        return NULL;

    if ((pdl || cooperative) && driver.launch_kernel_ex == NULL) {
        PyErr_SetString(PyExc_OSError, "the CUDA driver has no cuLaunchKernelEx, which programmatic "
                                       "dependent and cooperative launches need; it came with "
                                       "CUDA 11.8");
        return NULL;
    }

    Launcher *self = (Launcher *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->vectorcall = launcher_call;
    self->function = (void *)(uintptr_t)function;
    self->context = (void *)(uintptr_t)context;
    for (int axis = 0; axis < 3; ++axis)
        self->block[axis] = (unsigned)block[axis];
    self->smem = (unsigned)smem;
    self->pdl = pdl;
    self->cooperative = cooperative;
    self->count = count;
    memcpy(self->format, format, (size_t)count);
    self->name = name ? Py_NewRef(name) : PyUnicode_FromString("kernel");
    self->error = Py_NewRef(error);
    if (self->name == NULL) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static int launcher_traverse(PyObject *object, visitproc visit, void *arg) {
    Launcher *self = (Launcher *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->error);
    return 0;
}

static int launcher_clear(PyObject *object) {
    Py_CLEAR(((Launcher *)object)->error);
    return 0;
}

static void launcher_dealloc(PyObject *object) {
    Launcher *self = (Launcher *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    Py_XDECREF(self->error);
    Py_XDECREF(self->name);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyMemberDef launcher_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Launcher, vectorcall), READONLY, NULL},
    {"name", T_OBJECT, offsetof(Launcher, name), READONLY, "The kernel's name."},
    {NULL, 0, 0, 0, NULL},
};

PyDoc_STRVAR(launcher_doc,
             "Launcher(function, format, block, smem, name='kernel', context=0, "
             "error=RuntimeError, pdl=False, cooperative=False)\n--\n\n"
             "A kernel with its block and shared memory, called as\n"
             "launcher(stream, grid_x, grid_y, grid_z, *kernel_arguments).");

static PyType_Slot launcher_slots[] = {
    {Py_tp_doc, (void *)launcher_doc},       {Py_tp_new, launcher_new},
    {Py_tp_dealloc, launcher_dealloc},       {Py_tp_traverse, launcher_traverse},
    {Py_tp_clear, launcher_clear},           {Py_tp_call, PyVectorcall_Call},
    {Py_tp_members, launcher_members},       {0, NULL},
};

static PyType_Spec launcher_spec = {
    .name = "_launch.Launcher",
    .basicsize = sizeof(Launcher),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL |
             Py_TPFLAGS_IMMUTABLETYPE,
    .slots = launcher_slots,
};

/* --- module -------------------------------------------------------------------------------- */

static PyObject *set_driver(PyObject *module, PyObject *path) {
    (void)module;
    const char *text = PyUnicode_AsUTF8(path);
    if (text == NULL || load_driver(text) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef module_methods[] = {
    {"set_driver", set_driver, METH_O,
     "set_driver(path, /)\n--\n\n"
     "Launch through another library than libcuda.so.1 from now on; for tests without a GPU."},
    {NULL, NULL, 0, NULL},
};

static int module_exec(PyObject *module) {
    PyObject *type = PyType_FromModuleAndSpec(module, &launcher_spec, NULL);
    if (type == NULL)
        return -1;
    const int failed = PyModule_AddObjectRef(module, "Launcher", type);
    Py_DECREF(type);
    return failed;
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
#ifdef Py_mod_gil
    {Py_mod_gil, Py_MOD_GIL_NOT_USED}, /* a Launcher never changes; a call lives on its stack */
#endif
    {0, NULL},
};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_launch",
    .m_doc = "Kernel launches with little host time.",
    .m_methods = module_methods,
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__launch(void) { return PyModuleDef_Init(&module_definition); }
