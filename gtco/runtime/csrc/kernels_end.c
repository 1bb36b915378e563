/* Behind the kernels (kernels_begin.c): where a thread continues whose restartable call was ended. */
#include "restart_frame.h"

#ifdef GTCO_RESTARTS
/* The stack pointer is the kernel's, so there is a stack for the function that finds the caller's. The system wants
 * the signature before the place where it continues; disassemblers take it for an instruction. */
__asm__(
    ".text\n"
    ".globl gtco_kernels_end\n"
    ".hidden gtco_kernels_end\n"
    "gtco_kernels_end:\n"
    "  .byte 0x0f, 0xb9, 0x3d\n"
    "  .long 0x53053053\n"
    ".globl gtco_call_ended\n"
    ".hidden gtco_call_ended\n"
    "gtco_call_ended:\n"
    "  and $-16, %rsp\n"
    "  cld\n"
    "  vzeroupper\n" /* as at a kernel's end */
    "  call gtco_this_frame\n"
    "  mov 0(%rax), %rsp\n"
    "  pop %r9\n"
    "  pop %r15\n  pop %r14\n  pop %r13\n  pop %r12\n  pop %rbx\n  pop %rbp\n"
    "  xor %eax, %eax\n"
    "  ret\n");
#endif
