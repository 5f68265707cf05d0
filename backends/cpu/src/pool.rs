//! A small thread pool for the ops of one backend: the caller and `threads - 1` workers take task
//! numbers from one counter until none is left.
//!
//! Which thread computes a task never changes a result, so the pool may be as dynamic as it likes.
//! A worker spins briefly for the next op and then sleeps; one that does not wake in time is simply
//! not waited for. A panic in a task reaches the caller after all threads have left the job.

use crate::CpuError;
use crate::aside::{Aside, Panic, Work};
use crate::bind::Processors;
use std::any::Any;
use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Most threads a pool takes; far above the processors of any machine.
pub(crate) const MOST_THREADS: usize = 1024;

/// How long a worker spins for the next op: ops of one step follow each other faster than this.
const SPIN: Duration = Duration::from_micros(60);

/// `gate` holds `generation << 16 | OPEN | workers inside`.
const OPEN: u64 = 1 << 15;
const INSIDE: u64 = OPEN - 1;

pub(crate) struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    generation: u64,
}

struct Shared {
    gate: AtomicU64,
    next: AtomicUsize,
    job: UnsafeCell<Job>,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    stop: AtomicBool,
    sleepers: AtomicUsize,
    sleep: Mutex<()>,
    wake: Condvar,
    aside: Aside,
    processors: Option<Processors>,
}

#[derive(Clone, Copy)]
struct Job {
    call: unsafe fn(*const (), usize),
    data: *const (),
    tasks: usize,
}

// SAFETY: `job` is written only by the pool's owner while the gate is closed and nobody is inside,
// and read only between entering and leaving the gate; `data` points to a `Sync` closure that
// outlives the job.
unsafe impl Sync for Shared {}
// SAFETY: as above.
unsafe impl Send for Shared {}

impl Pool {
    /// A pool of `threads` threads, the caller included.
    pub fn new(threads: usize) -> Result<Self, CpuError> {
        if threads == 0 || threads > MOST_THREADS {
            return Err(CpuError::Threads { given: threads, most: MOST_THREADS });
        }
        unsafe fn nothing(_: *const (), _: usize) {}
        let shared = Arc::new(Shared {
            gate: AtomicU64::new(0),
            next: AtomicUsize::new(0),
            job: UnsafeCell::new(Job { call: nothing, data: std::ptr::null(), tasks: 0 }),
            panic: Mutex::new(None),
            stop: AtomicBool::new(false),
            sleepers: AtomicUsize::new(0),
            sleep: Mutex::new(()),
            wake: Condvar::new(),
            aside: Aside::default(),
            processors: Processors::of(threads),
        });
        let mut pool = Pool { shared, workers: Vec::with_capacity(threads - 1), generation: 0 };
        for index in 1..threads {
            let shared = pool.shared.clone();
            let worker = std::thread::Builder::new()
                .name(format!("dunlin-cpu-{index}"))
                .spawn(move || shared.work())
                .map_err(|e| CpuError::Spawn { index, reason: e.to_string() })?;
            pool.workers.push(worker);
        }
        Ok(pool)
    }

    /// Threads that share a job, the caller included.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Has a worker do `work` if one is awake, and does it here otherwise. See `aside.rs`.
    pub fn beside(&self, work: Work) {
        let s = &*self.shared;
        s.keep(s.aside.put(work));
        // One that fell asleep before it could see the work is not woken for it.
        if s.sleepers.load(Ordering::SeqCst) == self.workers.len() {
            s.keep(s.aside.run());
        }
    }

    /// Calls `f(0) .. f(tasks - 1)`, each once, in any order, on any thread; returns after all.
    pub fn run<F: Fn(usize) + Sync>(&mut self, tasks: usize, f: &F) {
        if tasks <= 1 || self.workers.is_empty() {
            (0..tasks).for_each(f);
            return;
        }
        unsafe fn call<F: Fn(usize)>(data: *const (), task: usize) {
            // SAFETY: `data` is the closure that `run` borrowed for the whole job.
            unsafe { (*data.cast::<F>())(task) }
        }
        let job = Job { call: call::<F>, data: (&raw const *f).cast(), tasks };
        let s = &*self.shared;
        // Its turn has come, whoever was to do it.
        s.keep(s.aside.run());
        // SAFETY: the gate is closed and nobody is inside.
        unsafe { *s.job.get() = job };
        s.next.store(0, Ordering::Relaxed);
        self.generation += 1;
        s.gate.store(self.generation << 16 | OPEN, Ordering::SeqCst);
        if s.sleepers.load(Ordering::SeqCst) > 0 {
            if let Some(processors) = &s.processors {
                processors.send(&self.workers);
            }
            drop(s.sleep.lock().unwrap_or_else(PoisonError::into_inner));
            s.wake.notify_all();
        }
        s.take_tasks(job);
        s.gate.fetch_and(!OPEN, Ordering::AcqRel);
        s.wait_until_left();
        let panic = s.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        drop(self.shared.sleep.lock().unwrap_or_else(PoisonError::into_inner));
        self.shared.wake.notify_all();
        for worker in self.workers.drain(..) {
            // A worker catches the panics of its tasks, so it has none of its own to report.
            let _ = worker.join();
        }
        self.shared.keep(self.shared.aside.run());
    }
}

impl Shared {
    fn work(&self) {
        let mut seen = 0;
        while let Some(generation) = self.enter(seen) {
            seen = generation;
            // SAFETY: entered, so the job stays as it is until we leave.
            let job = unsafe { *self.job.get() };
            self.take_tasks(job);
            self.gate.fetch_sub(1, Ordering::Release);
        }
    }

    /// Waits for a job newer than `seen` and enters it; `None` when the pool is dropped.
    fn enter(&self, seen: u64) -> Option<u64> {
        let start = Instant::now();
        loop {
            for _ in 0..64 {
                if let Some(generation) = self.try_enter(seen) {
                    return Some(generation);
                }
                self.keep(self.aside.run());
                std::hint::spin_loop();
            }
            if self.stop.load(Ordering::SeqCst) {
                return None;
            }
            if start.elapsed() > SPIN {
                break;
            }
        }
        let mut guard = self.sleep.lock().unwrap_or_else(PoisonError::into_inner);
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let entered = loop {
            if self.stop.load(Ordering::SeqCst) {
                break None;
            }
            if let Some(generation) = self.try_enter(seen) {
                break Some(generation);
            }
            self.keep(self.aside.run());
            guard = self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
        };
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
        drop(guard);
        if let Some(processors) = &self.processors {
            processors.release();
        }
        entered
    }

    /// A panic is for the caller: the end of the job, or of the next one, brings it.
    fn keep(&self, result: Result<(), Panic>) {
        if let Err(panic) = result {
            *self.panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(panic);
        }
    }

    fn try_enter(&self, seen: u64) -> Option<u64> {
        let gate = self.gate.load(Ordering::SeqCst);
        if gate & OPEN == 0 || gate >> 16 == seen {
            return None;
        }
        let entered =
            self.gate.compare_exchange(gate, gate + 1, Ordering::AcqRel, Ordering::Relaxed);
        entered.is_ok().then_some(gate >> 16)
    }

    fn take_tasks(&self, job: Job) {
        let tasks = AssertUnwindSafe(|| {
            loop {
                let task = self.next.fetch_add(1, Ordering::Relaxed);
                if task >= job.tasks {
                    return;
                }
                // SAFETY: the closure outlives the job, and each task number is handed out once.
                unsafe { (job.call)(job.data, task) };
            }
        });
        let done = catch_unwind(tasks);
        if done.is_err() {
            // Nobody need start what is left.
            self.next.store(job.tasks, Ordering::Relaxed);
        }
        self.keep(done);
    }

    fn wait_until_left(&self) {
        let mut spins = 0u32;
        while self.gate.load(Ordering::Acquire) & INSIDE != 0 {
            spins += 1;
            if spins < 2_000 {
                std::hint::spin_loop();
            } else {
                // A worker was descheduled inside a task: let it have the processor.
                std::thread::yield_now();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_task_runs_once() {
        for threads in [1, 2, 5] {
            let mut pool = Pool::new(threads).unwrap();
            for round in 0..2000 {
                let tasks = round % 37;
                let counts: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
                pool.run(tasks, &|i| {
                    counts[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1));
                if round % 500 == 0 {
                    // Let the workers fall asleep.
                    std::thread::sleep(Duration::from_millis(2));
                }
            }
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
        let mut pool = Pool::new(3).unwrap();
        for victim in 0..8 {
            let caught = catch_unwind(AssertUnwindSafe(|| {
                pool.run(8, &|i| assert!(i != victim, "task {i}"));
            }));
            assert!(caught.is_err());
            let sum = AtomicUsize::new(0);
            pool.run(100, &|i| {
                sum.fetch_add(i, Ordering::Relaxed);
            });
            assert_eq!(sum.load(Ordering::Relaxed), 4950);
        }
    }

    #[test]
    fn work_beside_is_done_once_in_order_whoever_is_awake() {
        for threads in [1, 2, 5] {
            let mut pool = Pool::new(threads).unwrap();
            let seen = Arc::new(Mutex::new(Vec::new()));
            for round in 0..1000 {
                pool.run(threads, &|_| ());
                if round % 100 == 0 {
                    std::thread::sleep(Duration::from_millis(2));
                }
                let seen = seen.clone();
                pool.beside(Box::new(move || seen.lock().unwrap().push(round)));
            }
            drop(pool);
            assert_eq!(*seen.lock().unwrap(), (0..1000).collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_panic_beside_reaches_the_next_job() {
        let mut pool = Pool::new(2).unwrap();
        pool.beside(Box::new(|| panic!("as told")));
        let caught = catch_unwind(AssertUnwindSafe(|| pool.run(2, &|_| ())));
        assert!(caught.is_err());
        pool.run(2, &|_| ());
    }

    #[test]
    fn wrong_thread_counts_are_refused() {
        assert!(matches!(Pool::new(0), Err(CpuError::Threads { .. })));
        assert!(matches!(Pool::new(MOST_THREADS + 1), Err(CpuError::Threads { .. })));
    }
}
