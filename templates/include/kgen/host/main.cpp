// Stand-alone runner: a kernel, the runtime and this file in one executable built with
// AddressSanitizer. (A module loaded into Python cannot use AddressSanitizer, which must be loaded
// before everything else.)
//
//     runner JOB
//
// JOB is a text file written by `write_job` in kgen/launch/host_jobs.py:
//
//     kgen-job 1
//     buffer BYTES PATH                     initial content; "-": filled with 0xFF
//     constant BYTES PATH                   the same, for a buffer that no launch may write
//     launch KERNEL GX GY GZ BX BY BZ SMEM SEED ARGS
//     pointer BUFFER OFFSET                 an argument: address in a buffer
//     value HEX                             an argument: its bytes in memory order
//     output BUFFER PATH                    written after the last launch
//
// Paths end their line and may contain blanks. Every buffer is a heap block of exactly its size, so
// that the sanitizer sees the first byte read or written outside it.
//
// Exit status: 0 done; 1 bad job; 2 the launch was refused or a thread did something undefined,
// with the message on stderr; whatever ASAN_OPTIONS says after a sanitizer report.
#include "runtime.hpp"
#include "sanitizer.hpp"

#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

namespace {

using kgen::host::Launch;

[[noreturn]] __attribute__((format(printf, 1, 2))) void die(const char* format, ...) {
    va_list list;
    va_start(list, format);
    vfprintf(stderr, format, list);
    fputc('\n', stderr);
    exit(1);
}

struct Buffer {
    unsigned char* data = nullptr;
    size_t bytes = 0;
};

// The storage of one argument; kernels take them by address.
struct Argument {
    alignas(16) unsigned char bytes[256] = {};
};

std::string rest_of(std::istringstream& line) {
    std::string rest;
    std::getline(line >> std::ws, rest);
    return rest;
}

class Runner {
public:
    explicit Runner(const char* path) : in_(path) {
        if (!in_) die("cannot read job %s", path);
        std::string magic;
        std::getline(in_, magic);
        if (magic != "kgen-job 1") die("%s is not a kgen-job 1 file", path);
    }

    void run() {
        std::string text;
        while (std::getline(in_, text)) {
            std::istringstream line(text);
            std::string word;
            line >> word;
            if (word == "buffer")
                read_buffer(line, false);
            else if (word == "constant")
                read_buffer(line, true);
            else if (word == "launch")
                launch(line);
            else if (word == "output")
                write_buffer(line);
            else if (!word.empty())
                die("unknown line in job: %s", text.c_str());
        }
    }

private:
    void read_buffer(std::istringstream& line, bool constant) {
        Buffer buffer;
        line >> buffer.bytes;
        const std::string path = rest_of(line);
        void* data = nullptr;
        // 256 bytes is the alignment cudaMalloc promises; an empty buffer has an address too.
        // Memory is write-protected in whole pages, so a constant buffer has pages of its own. The
        // sanitizer watches the rest of the last page.
        const size_t page = constant ? static_cast<size_t>(sysconf(_SC_PAGESIZE)) : 0;
        const size_t there = constant ? (buffer.bytes + page - 1) / page * page : buffer.bytes;
        if (posix_memalign(&data, constant ? page : 256, there) != 0)
            die("no memory for %zu bytes", there);
        buffer.data = static_cast<unsigned char*>(data);
        if (path == "-") {
            memset(buffer.data, 0xff, buffer.bytes);
        } else {
            std::ifstream file(path, std::ios::binary);
            file.read(reinterpret_cast<char*>(buffer.data),
                      static_cast<std::streamsize>(buffer.bytes));
            if (!file) die("cannot read %zu bytes from %s", buffer.bytes, path.c_str());
        }
        if (constant && there > 0) {
#if defined(KGEN_ASAN)
            if (there > buffer.bytes)
                __asan_poison_memory_region(buffer.data + buffer.bytes, there - buffer.bytes);
#endif
            if (mprotect(data, there, PROT_READ) != 0) die("cannot protect %zu bytes", there);
        }
        buffers_.push_back(buffer);
    }

    const Buffer& buffer_at(size_t index) const {
        if (index >= buffers_.size()) die("job names buffer %zu of %zu", index, buffers_.size());
        return buffers_[index];
    }

    void read_argument(Argument& argument) {
        std::string text;
        if (!std::getline(in_, text)) die("job ends within the arguments of a launch");
        std::istringstream line(text);
        std::string word;
        line >> word;
        if (word == "pointer") {
            size_t index = 0, offset = 0;
            line >> index >> offset;
            unsigned char* address = buffer_at(index).data + offset;
            memcpy(argument.bytes, &address, sizeof(address));
        } else if (word == "value") {
            std::string hex;
            line >> hex;
            if (hex.size() / 2 > sizeof(argument.bytes))
                die("argument of %zu bytes", hex.size() / 2);
            for (size_t i = 0; i < hex.size() / 2; ++i)
                argument.bytes[i] =
                    static_cast<unsigned char>(strtoul(hex.substr(2 * i, 2).c_str(), nullptr, 16));
        } else {
            die("not an argument: %s", text.c_str());
        }
    }

    void launch(std::istringstream& line) {
        std::string kernel;
        Launch launch = {};
        size_t count = 0;
        line >> kernel;
        for (auto& extent : launch.grid) line >> extent;
        for (auto& extent : launch.block) line >> extent;
        line >> launch.smem_bytes >> launch.seed >> count;
        if (!line) die("incomplete launch of %s", kernel.c_str());
        std::vector<Argument> arguments(count);
        std::vector<void*> addresses;
        for (Argument& argument : arguments) {
            read_argument(argument);
            addresses.push_back(argument.bytes);
        }
        using Entry = int (*)(const Launch*, void**);
        void* const symbol = dlsym(RTLD_DEFAULT, (kernel + "__host").c_str());
        const auto entry = reinterpret_cast<Entry>(symbol);
        if (!entry) die("no kernel %s (is KGEN_EXPORT missing?)", kernel.c_str());
        char error[4096] = "";
        launch.error = error;
        launch.error_bytes = sizeof(error);
        if (entry(&launch, addresses.data()) != 0) {
            fprintf(stderr, "%s: %s\n", kernel.c_str(), error);
            exit(2);
        }
    }

    void write_buffer(std::istringstream& line) {
        size_t index = 0;
        line >> index;
        const std::string path = rest_of(line);
        const Buffer& buffer = buffer_at(index);
        std::ofstream file(path, std::ios::binary);
        file.write(reinterpret_cast<const char*>(buffer.data),
                   static_cast<std::streamsize>(buffer.bytes));
        file.close();
        if (!file) die("cannot write %s", path.c_str());
    }

    std::ifstream in_;
    std::vector<Buffer> buffers_;
};

}  // namespace

int main(int argc, char** argv) {
    if (argc != 2) die("usage: %s JOB", argv[0]);
    Runner(argv[1]).run();
    return 0;
}
