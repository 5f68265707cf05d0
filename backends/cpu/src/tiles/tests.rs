//! Products over tiles give the bits of the lanes, for all forms and shapes: tiles in plain Rust
//! everywhere, and those of AMX where there is one. `tools/amx_emulated` runs this file where there
//! is none.

use super::*;
use crate::{CpuBackend, CpuOptions, Path, Precision};
use bytes::Bytes;
use dunlin_backend::{Backend, DType, HostTensor, LinearPart, Part};

struct Random(u64);

impl Random {
    fn byte(&mut self) -> u8 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 56) as u8
    }
    fn float(&mut self) -> f32 {
        f32::from(self.byte() as i8) / 64.0 + f32::from(self.byte()) / 4096.0
    }
}

/// A matrix of random codes under small scales.
fn matrix(r: &mut Random, dtype: DType, rows: usize, cols: usize) -> HostTensor {
    let bytes = rows * dtype.row_bytes(cols).expect("whole blocks");
    let mut data: Vec<u8> = (0..bytes).map(|_| r.byte()).collect();
    let halves: &[usize] = match dtype {
        DType::Q6_K => &[208],
        DType::Q4_1 | DType::Q5_1 | DType::Q4_K | DType::Q5_K => &[0, 2],
        _ => &[0],
    };
    for block in data.chunks_exact_mut(dtype.block_bytes()) {
        for at in halves {
            // A float16 between 2^-8 and 2^-7, of either sign.
            let half = 0x1c00 | u16::from(r.byte()) << 2 | u16::from(r.byte() & 128) << 8;
            block[*at..at + 2].copy_from_slice(&half.to_le_bytes());
        }
    }
    HostTensor::new("tiles", dtype, rows, cols, Bytes::from(data)).expect("a matrix")
}

/// The units of this machine whose products may stand beside the lanes of `path`.
fn units(path: Path) -> Vec<Unit> {
    #[cfg(target_arch = "x86_64")]
    if path == Path::Avx512 && amx::allowed() {
        return vec![Unit::Soft, Unit::Amx];
    }
    // Lanes of `Path::Amx` are those of `Path::Avx512`.
    if path == Path::Amx { vec![Unit::Amx] } else { vec![Unit::Soft] }
}

#[test]
fn tiles_give_the_bits_of_the_lanes() {
    let mut r = Random(7);
    let forms = [
        DType::Q4_0,
        DType::Q4_1,
        DType::Q4_K,
        DType::Q8_0,
        DType::Q5_0,
        DType::Q5_1,
        DType::Q5_K,
        DType::Q6_K,
    ];
    for path in Path::ALL.into_iter().filter(|path| path.available()) {
        let backend = |tiles| {
            let options =
                CpuOptions { threads: 2, precision: Precision::Fast, kv: None, path: Some(path) };
            CpuBackend::new(options).expect("a backend").with_tiles(tiles)
        };
        let plain = backend(None);
        let tiled: Vec<_> =
            units(path).into_iter().map(|unit| (unit, backend(Some(unit)))).collect();
        for dtype in forms {
            let wide = dtype.block_elements();
            for (outs, blocks, rows) in
                [(16, 1, 8), (5, 2, 9), (40, 3, 16), (33, 1, 31), (70, 2, 77), (16, 1, 3)]
            {
                let cols = wide * blocks;
                let t = matrix(&mut r, dtype, outs, cols);
                let x: Vec<f32> = (0..rows * cols).map(|_| r.float()).collect();
                let bits = |b: &CpuBackend| {
                    let weight = b.weight(&t, &Part::all(&t)).expect("a weight");
                    let mut input = b.tensor(rows, cols).expect("a tensor");
                    b.upload(&x, &mut input).expect("an upload");
                    let mut out = b.tensor(rows, outs).expect("a tensor");
                    b.linear(
                        &input,
                        &mut [LinearPart { weight: &weight, bias: None, out: &mut out }],
                    )
                    .expect("a product");
                    let mut host = Vec::new();
                    b.download(&out, &mut host).expect("a download");
                    host.into_iter().map(f32::to_bits).collect::<Vec<_>>()
                };
                let want = bits(&plain);
                assert!(want.iter().any(|bits| *bits != 0), "{dtype:?}");
                for (unit, tiled) in &tiled {
                    let shape = format!("{dtype:?} [{outs}, {cols}], {rows} rows");
                    assert!(bits(tiled) == want, "{unit:?} beside {path:?}, {shape}");
                }
            }
        }
    }
}

/// A unit that is wrong in one sum of one product.
struct Wrong(Soft);

impl Tiles for Wrong {
    unsafe fn enter() -> Self {
        // SAFETY: plain Rust.
        Wrong(unsafe { Soft::enter() })
    }
    unsafe fn products<const N: usize>(
        &mut self,
        a: [*const ActBlock; N],
        codes: *const u8,
        out: *mut i32,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            self.0.products(a, codes, out);
            if N == 1 {
                *out.add(77) += 1;
            }
        }
    }
    unsafe fn leave(self) {}
}

#[test]
fn the_self_check_notices_one_wrong_sum() {
    // SAFETY: both are plain Rust.
    unsafe {
        assert!(agrees::<Soft>());
        assert!(!agrees::<Wrong>());
    }
}

/// Without this the rest would pass as well where AMX was asked for and does not come up.
#[test]
fn the_path_that_the_environment_names_is_taken() {
    let path = Path::choose(None).expect("the path that DUNLIN_CPU names");
    if let Some(name) = std::env::var_os(crate::PATH_VARIABLE) {
        assert_eq!(name.to_str(), Some(path.name()));
    }
}

/// Where there is a unit it must agree, or say that it is off; where there is none, nothing asks it.
#[test]
fn amx_is_off_or_right() {
    #[cfg(target_arch = "x86_64")]
    if amx::allowed() {
        // SAFETY: processor and system have the unit.
        assert_eq!(unsafe { agrees::<amx::Amx>() }, amx_works());
        return;
    }
    assert!(!amx_works());
}
