/* The linker puts this file before the kernels and kernels_end.c behind them. The code between is what the system
 * restarts: a thread that is interrupted at one of its instructions continues at gtco_call_ended. */
#include "restart_frame.h"

#ifdef GTCO_RESTARTS
/* int gtco_call_in_frame(gtco_kernel, void* const* b, void* w, int64_t begin, int64_t end, gtco_frame*) */
__asm__(
    ".text\n"
    ".globl gtco_kernels_begin\n"
    ".hidden gtco_kernels_begin\n"
    "gtco_kernels_begin:\n"
    ".globl gtco_call_in_frame\n"
    ".hidden gtco_call_in_frame\n"
    ".type gtco_call_in_frame, @function\n"
    "gtco_call_in_frame:\n"
    "  push %rbp\n  push %rbx\n  push %r12\n  push %r13\n  push %r14\n  push %r15\n"
    "  push %r9\n"
    "  mov %rsp, 0(%r9)\n"
    "  mov 8(%r9), %rax\n"
    "  mov 16(%r9), %r10\n"
    "  mov %r10, (%rax)\n" /* from here on the call can be ended */
    "  mov 24(%r9), %rax\n"
    "  mov 32(%r9), %r10\n"
    "  mov %rdi, %r11\n"
    "  mov %rsi, %rdi\n"
    "  mov %rdx, %rsi\n"
    "  mov %rcx, %rdx\n"
    "  mov %r8, %rcx\n"
    "  cmp %r10, (%rax)\n"
    "  jne 1f\n" /* taken over before it began */
    "  call *%r11\n"
    "1:\n"
    "  mov (%rsp), %r9\n"
    "  mov 8(%r9), %rax\n"
    "  movq $0, (%rax)\n"
    "  pop %r9\n"
    "  pop %r15\n  pop %r14\n  pop %r13\n  pop %r12\n  pop %rbx\n  pop %rbp\n"
    "  mov $1, %eax\n"
    "  ret\n"
    ".size gtco_call_in_frame, . - gtco_call_in_frame\n");
#endif
