//! Instruction paths: which one this processor can take, and which one was asked for.

use crate::CpuError;
#[cfg(target_arch = "x86_64")]
use crate::tiles::amx_works;

/// Environment variable that forces a path: `scalar`, `avx2`, `avx512` or `amx`.
pub const PATH_VARIABLE: &str = "DUNLIN_CPU";

/// An instruction path. All of them compute the same bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Path {
    /// Plain Rust.
    Scalar,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, VL, DQ and VNNI.
    Avx512,
    /// As [`Path::Avx512`], with AMX int8 tiles for products of many rows.
    Amx,
}

impl Path {
    /// Every path, slowest first.
    pub const ALL: [Path; 4] = [Path::Scalar, Path::Avx2, Path::Avx512, Path::Amx];

    /// The paths that this processor can take.
    pub fn here() -> impl Iterator<Item = Path> {
        Path::ALL.into_iter().filter(|path| path.available())
    }

    /// The name that [`PATH_VARIABLE`] takes.
    pub const fn name(self) -> &'static str {
        match self {
            Path::Scalar => "scalar",
            Path::Avx2 => "avx2",
            Path::Avx512 => "avx512",
            Path::Amx => "amx",
        }
    }

    /// Whether this processor has the path's instructions, and for AMX, whether it was found to
    /// compute what it should.
    pub fn available(self) -> bool {
        match self {
            Path::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Path::Avx2 => has_avx2(),
            #[cfg(target_arch = "x86_64")]
            Path::Avx512 => {
                has_avx2()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vnni")
            }
            #[cfg(target_arch = "x86_64")]
            Path::Amx => Path::Avx512.available() && amx_works(),
            #[cfg(not(target_arch = "x86_64"))]
            _ => false,
        }
    }

    /// `wanted`, else what [`PATH_VARIABLE`] names, else the fastest available path.
    pub fn choose(wanted: Option<Path>) -> Result<Path, CpuError> {
        let wanted = match (wanted, std::env::var_os(PATH_VARIABLE)) {
            (Some(path), _) => Some(path),
            (None, None) => None,
            (None, Some(name)) => Some(Path::parse(&name.to_string_lossy())?),
        };
        match wanted {
            Some(path) if path.available() => Ok(path),
            Some(path) => {
                let has: Vec<&str> = Path::here().map(Path::name).collect();
                Err(CpuError::PathUnavailable { path: path.name(), has: has.join(", ") })
            }
            None => Ok(Path::here().last().unwrap_or(Path::Scalar)),
        }
    }

    /// The path called `name`.
    pub fn parse(name: &str) -> Result<Path, CpuError> {
        Path::ALL
            .into_iter()
            .find(|p| p.name() == name)
            .ok_or_else(|| CpuError::UnknownPath { given: name.to_owned() })
    }
}

#[cfg(target_arch = "x86_64")]
fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c")
}
