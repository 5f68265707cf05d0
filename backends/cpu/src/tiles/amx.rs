//! The AMX leaf. Stable Rust has no intrinsics for it, so the instructions stand in `asm!`.
//!
//! No machine that this was written on has AMX. It was run on an emulated one (`tools/amx_emulated`);
//! on a real one the self-check of the module above decides whether it is used.

use super::{CODE_BYTES, SHAPES, TILE_SUMS, Tiles};
use crate::activations::ActBlock;
use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count};

/// What `ldtilecfg` reads.
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

static CONFIG: Config = {
    let mut config =
        Config { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
    let mut i = 0;
    while i < SHAPES.len() {
        config.row_bytes[i] = SHAPES[i].bytes as u16;
        config.rows[i] = SHAPES[i].rows as u8;
        i += 1;
    }
    config
};

/// This thread's tile registers.
pub(crate) struct Amx(());

impl Tiles for Amx {
    #[inline(always)]
    unsafe fn enter() -> Self {
        // SAFETY: the caller vouches for the unit; the configuration has 64 bytes.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const CONFIG, options(nostack, readonly)) };
        Self(())
    }

    #[inline(always)]
    unsafe fn products<const N: usize>(
        &mut self,
        a: [*const ActBlock; N],
        codes: *const u8,
        out: *mut i32,
    ) {
        const { assert!(CODE_BYTES == 8 * 64 && size_of::<ActBlock>() == 64) };
        // SAFETY: shapes are those of `CONFIG`, which read 8 rows of 32 bytes from each `a`, 8 of 64
        // from `codes`, and write 8 of 64 for each of the `N` tiles, all 64 bytes apart. Tiles hold
        // nothing before or after the block.
        unsafe {
            if let [first, second] = a[..] {
                asm!(
                    "tileloadd tmm4, [{codes} + {step}]",
                    "tilezero tmm0",
                    "tileloadd tmm2, [{first} + {step}]",
                    "tdpbsud tmm0, tmm2, tmm4",
                    "tilestored [{out} + {step}], tmm0",
                    "tilezero tmm1",
                    "tileloadd tmm3, [{second} + {step}]",
                    "tdpbsud tmm1, tmm3, tmm4",
                    "tilestored [{next} + {step}], tmm1",
                    codes = in(reg) codes, first = in(reg) first, second = in(reg) second,
                    out = in(reg) out, next = in(reg) out.add(TILE_SUMS), step = in(reg) 64usize,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _,
                    options(nostack),
                );
            } else {
                for (n, a) in a.into_iter().enumerate() {
                    asm!(
                        "tileloadd tmm4, [{codes} + {step}]",
                        "tilezero tmm0",
                        "tileloadd tmm2, [{a} + {step}]",
                        "tdpbsud tmm0, tmm2, tmm4",
                        "tilestored [{out} + {step}], tmm0",
                        codes = in(reg) codes, a = in(reg) a,
                        out = in(reg) out.add(n * TILE_SUMS), step = in(reg) 64usize,
                        out("tmm0") _, out("tmm2") _, out("tmm4") _,
                        options(nostack),
                    );
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn leave(self) {
        // SAFETY: the caller vouches for the unit.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }
}

/// Whether the processor has AMX with int8, the system saves its state, and lets this process use
/// it. Asking is what grants the use, to all threads of the process.
pub(crate) fn allowed() -> bool {
    const TILE_AND_INT8: u32 = 1 << 24 | 1 << 25;
    const OSXSAVE: u32 = 1 << 27;
    // Tile configuration and tile data.
    const STATE: u32 = 1 << 17 | 1 << 18;
    // SAFETY: every x86-64 processor has `cpuid`.
    let (leaves, basic) = (__cpuid(0).eax, __cpuid(1).ecx);
    if leaves < 7 || basic & OSXSAVE == 0 {
        return false;
    }
    let features = __cpuid_count(7, 0).edx;
    if features & TILE_AND_INT8 != TILE_AND_INT8 {
        return false;
    }
    let saved: u32;
    // SAFETY: OSXSAVE says that `xgetbv` is there.
    unsafe {
        asm!("xgetbv", in("ecx") 0, out("eax") saved, out("edx") _, options(nomem, nostack));
    }
    saved & STATE == STATE && ask()
}

/// Asks Linux for the large state of tiles.
#[cfg(target_os = "linux")]
fn ask() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_int = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_ulong = 18;
    // SAFETY: the call takes two numbers and changes nothing but the permission.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn ask() -> bool {
    false
}
