//! Where a pool's workers wake up.
//!
//! A pool of as many threads as there are processors needs all of them at once. A worker that slept
//! is woken by the thread that calls, and the kernel likes to put it on that thread's processor or
//! on the one where it last ran, though another is idle: on a busy machine it looks no further, and
//! the worker waits until the step is almost over. So a worker is sent to a processor other than
//! the caller's, each to its own, before it is woken, and set free as soon as it runs. (One that is
//! awake already stays where it is sent until it has slept again.)
//!
//! Smaller pools leave processors idle, and are left alone: which are theirs nobody knows.

use std::thread::JoinHandle;

/// The processors of a pool that takes all of them.
pub(crate) struct Processors(Vec<usize>);

impl Processors {
    /// `None` unless so many threads are one for each processor, and more than one.
    pub fn of(threads: usize) -> Option<Self> {
        let all = sys::allowed();
        (threads > 1 && all.len() == threads).then_some(Self(all))
    }

    /// Sends each worker to a processor of its own beside the calling thread's.
    pub fn send(&self, workers: &[JoinHandle<()>]) {
        let now = sys::current();
        let Some(caller) = self.0.iter().position(|processor| Some(*processor) == now) else {
            return;
        };
        let (before, after) = self.0.split_at(caller);
        let others = after.iter().skip(1).chain(before);
        // One that cannot be sent wakes wherever the kernel puts it, as it did before.
        workers.iter().zip(others).for_each(|(worker, processor)| sys::send(worker, *processor));
    }

    /// Lets the calling thread run on all of them again.
    pub fn release(&self) {
        sys::release(&self.0);
    }
}

#[cfg(target_os = "linux")]
mod sys {
    use std::mem::size_of;
    use std::os::unix::thread::JoinHandleExt;
    use std::thread::JoinHandle;

    const SIZE: usize = size_of::<libc::cpu_set_t>();

    fn set(processors: &[usize]) -> libc::cpu_set_t {
        // SAFETY: an all-zero set is the empty one; `CPU_SET` checks its bounds.
        unsafe {
            let mut set: libc::cpu_set_t = std::mem::zeroed();
            processors.iter().for_each(|processor| libc::CPU_SET(*processor, &mut set));
            set
        }
    }

    /// Processors that the calling thread may use.
    pub fn allowed() -> Vec<usize> {
        let mut found = set(&[]);
        // SAFETY: writes no more than the size of the set, of the calling thread.
        if unsafe { libc::sched_getaffinity(0, SIZE, &mut found) } != 0 {
            return Vec::new();
        }
        // SAFETY: below the number of bits in the set.
        (0..8 * SIZE).filter(|processor| unsafe { libc::CPU_ISSET(*processor, &found) }).collect()
    }

    /// Where the calling thread runs.
    pub fn current() -> Option<usize> {
        // SAFETY: no arguments, no effects.
        usize::try_from(unsafe { libc::sched_getcpu() }).ok()
    }

    pub fn send(worker: &JoinHandle<()>, processor: usize) {
        // SAFETY: the thread of a join handle exists until it is joined.
        unsafe { libc::pthread_setaffinity_np(worker.as_pthread_t(), SIZE, &set(&[processor])) };
    }

    pub fn release(all: &[usize]) {
        // SAFETY: the set is initialised, and of the size that is said.
        unsafe { libc::sched_setaffinity(0, SIZE, &set(all)) };
    }
}

#[cfg(not(target_os = "linux"))]
mod sys {
    use std::thread::JoinHandle;

    pub fn allowed() -> Vec<usize> {
        Vec::new()
    }

    pub fn current() -> Option<usize> {
        None
    }

    pub fn send(_: &JoinHandle<()>, _: usize) {}

    pub fn release(_: &[usize]) {}
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use std::sync::mpsc::{Sender, channel};

    /// A thread that says where it may run, free or not, each time it is asked.
    fn worker(
        all: &[usize],
    ) -> (Sender<bool>, std::sync::mpsc::Receiver<Vec<usize>>, JoinHandle<()>) {
        let ((ask, asked), (tell, told)) = (channel::<bool>(), channel());
        let processors = Processors(all.to_vec());
        let thread = std::thread::spawn(move || {
            for free in asked {
                if free {
                    processors.release();
                }
                let _ = tell.send(sys::allowed());
            }
        });
        (ask, told, thread)
    }

    #[test]
    fn each_worker_is_sent_to_a_processor_that_is_not_the_callers_and_set_free() {
        let all = sys::allowed();
        let Some(processors) = Processors::of(all.len()) else { return };
        // The caller must not move meanwhile.
        sys::release(&all[..1]);
        let (mut asks, mut told, mut threads) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 1..all.len() {
            let (ask, answer, thread) = worker(&all);
            asks.push(ask);
            told.push(answer);
            threads.push(thread);
        }
        processors.send(&threads);
        let answers = |free: bool| -> Vec<Vec<usize>> {
            asks.iter().for_each(|ask| ask.send(free).expect("it lives"));
            told.iter().map(|answer| answer.recv().expect("it answers")).collect()
        };
        assert_eq!(answers(false).concat(), all[1..], "each its own, and none the caller's");
        assert!(answers(true).iter().all(|allowed| *allowed == all));
        sys::release(&all);
        drop(asks);
        threads.into_iter().for_each(|thread| thread.join().expect("a worker"));
    }

    #[test]
    fn pools_of_another_size_are_left_alone() {
        assert!(Processors::of(1).is_none());
        assert!(Processors::of(sys::allowed().len() + 1).is_none());
    }
}
