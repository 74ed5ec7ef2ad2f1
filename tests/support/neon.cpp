// Runs calls of the CPU's expert kernels that tests/support/neon.py sends, on an emulated processor.
//
// Says how many bytes the structs have. Then, for each call: the form, the call, the bytes of what each of its 22
// addresses points to (0: null), and these; answers with the bytes of `out`.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

extern "C" {
int64_t moe_ops_cpu_experts_struct_bytes();
int64_t moe_ops_cpu_experts_scratch(const void* form, const void* call);
void moe_ops_cpu_experts_run(const void* form, const void* call, void* scratch);
}

constexpr int ADDRESSES = 22, OUT = 0;
struct Call {
    uint8_t* at[ADDRESSES];
    int64_t sizes[6];
};

bool read(void* to, size_t bytes) { return fread(to, 1, bytes, stdin) == bytes; }

int main() {
    const int64_t both = moe_ops_cpu_experts_struct_bytes();
    fwrite(&both, 8, 1, stdout);
    fflush(stdout);
    std::vector<uint8_t> form(both - sizeof(Call));
    Call call;
    int64_t bytes[ADDRESSES];
    while (read(form.data(), form.size())) {
        if (!read(&call, sizeof call) || !read(bytes, sizeof bytes)) return 1;
        for (int i = 0; i < ADDRESSES; ++i) {
            call.at[i] = bytes[i] ? (uint8_t*)malloc(bytes[i]) : nullptr;
            if (bytes[i] && !read(call.at[i], bytes[i])) return 1;
        }
        const int64_t needed = (moe_ops_cpu_experts_scratch(form.data(), &call) + 63) / 64 * 64;
        void* scratch = aligned_alloc(64, needed);
        memset(scratch, 0xFF, needed);  // NaN
        moe_ops_cpu_experts_run(form.data(), &call, scratch);
        fwrite(call.at[OUT], 1, bytes[OUT], stdout);
        fflush(stdout);
        free(scratch);
        for (uint8_t* one : call.at) free(one);
    }
}
