//! Supervision without processes: events and times in, actions out.

use gpurun_wire::{Failure, FailureKind, Phase, Position};

use super::*;

const KILL: i32 = 9;
const TERM: i32 = 15;

/// A job of ranks that exist only here.
struct Job {
    state: State,
    now: Duration,
}

impl Job {
    fn new(world: u32) -> Self {
        Self::with(Options { world, grace: None, hang_timeout: Some(Duration::from_secs(60)), max_restarts: 0 })
    }

    fn with(options: Options) -> Self {
        Self { state: State::new(options, Duration::ZERO), now: Duration::ZERO }
    }

    fn attached(world: u32) -> Self {
        let mut job = Self::new(world);
        for rank in 0..world {
            job.event(Event::Attached(rank));
        }
        job
    }

    fn event(&mut self, event: Event) -> Vec<Action> {
        decide(&mut self.state, &event, self.now)
    }

    /// Lets time pass in ticks of 100 ms, with `each` event before every tick, and collects what is to be done.
    fn pass(&mut self, millis: u64, each: &[Event]) -> Vec<Action> {
        let mut actions = Vec::new();
        for _ in 0..millis / 100 {
            self.now += Duration::from_millis(100);
            for event in each {
                actions.extend(self.event(event.clone()));
            }
            actions.extend(self.event(Event::Tick));
        }
        actions
    }

    fn exit(&mut self, rank: u32, status: Status) -> Vec<Action> {
        self.event(Event::Exited(rank, status))
    }

    /// All ranks that are left end with `status`, and everything is cleared away.
    fn end(&mut self, status: Status) -> Action {
        let mut actions = Vec::new();
        for rank in 0..self.state.ranks.len() as u32 {
            if self.state.ranks[rank as usize].exit.is_none() {
                self.exit(rank, status);
            }
            actions = self.event(Event::Gone(rank));
        }
        actions.pop().expect("the job is over")
    }

    fn verdict(&mut self, status: Status) -> Verdict {
        match self.end(status) {
            Action::Done(verdict) => verdict,
            other => panic!("{other:?}"),
        }
    }
}

fn died(number: i32) -> Status {
    Status::Signal { number, core: false }
}

fn failure(rank: u32, kind: FailureKind, exit_code: u8, secondary: bool) -> Event {
    let position = in_step(7, 3, false);
    Event::Failed(Failure { rank, position, kind, message: "why".to_owned(), exit_code, secondary })
}

fn in_step(step: u64, instruction: u32, waiting: bool) -> Position {
    Position { phase: Phase::Step, step, instruction: Some(instruction), text: "matmul".to_owned(), waiting }
}

fn at(rank: u32, position: Position, progress: u64) -> Event {
    Event::Seen(rank, position, progress)
}

#[test]
fn a_good_end() {
    let _limit = testkit::time_limit(10);
    let mut job = Job::new(2);
    assert_eq!(job.pass(1000, &[]), []);
    assert_eq!(job.exit(0, Status::Code(0)), []);
    assert_eq!(job.event(Event::Gone(0)), []);
    assert_eq!(job.pass(100_000, &[]), [], "a rank may end long before another");
    let verdict = job.verdict(Status::Code(0));
    assert_eq!(verdict, Verdict { exit_code: 0, cause: None, interrupt: None, killed: vec![], stuck: vec![] });
}

#[test]
fn programs_get_term_at_once_and_kill_a_second_later() {
    let _limit = testkit::time_limit(10);
    let mut job = Job::new(3);
    let actions = job.exit(1, Status::Code(7));
    assert_eq!(actions, [Action::Signal(0, TERM), Action::Signal(2, TERM)]);
    assert_eq!(job.pass(900, &[]), []);
    assert_eq!(job.pass(100, &[]), [Action::Kill(0), Action::Kill(2)]);
    assert_eq!(job.pass(5000, &[]), [], "once is enough");
    assert_eq!(
        (job.exit(0, died(KILL)), job.event(Event::Gone(1)), job.event(Event::Gone(0))),
        (vec![], vec![], vec![])
    );
    let verdict = job.verdict(died(KILL));
    assert_eq!(verdict.cause.as_ref().map(ToString::to_string).as_deref(), Some("rank 1 exited with code 7"));
    assert_eq!((verdict.exit_code, verdict.killed), (4, vec![0, 2]));
}

#[test]
fn a_process_stuck_in_the_kernel_is_not_waited_for() {
    let _limit = testkit::time_limit(10);
    let mut job = Job::with(Options { world: 2, grace: None, hang_timeout: None, max_restarts: 5 });
    job.exit(1, Status::Code(7));
    job.event(Event::Gone(1));
    assert_eq!(job.pass(10_900, &[]), [Action::Kill(0)]);
    let actions = job.pass(100, &[]);
    let [Action::Done(verdict)] = &actions[..] else { panic!("{actions:?}") };
    assert_eq!((verdict.exit_code, &verdict.stuck), (4, &vec![0]));
}

#[test]
fn attached_ranks_are_told_before_they_are_pressed() {
    let _limit = testkit::time_limit(10);
    let mut job = Job::attached(2);
    let actions = job.event(failure(1, FailureKind::Error, 3, false));
    let reason = "rank 1 failed in step 7, instruction 3 (matmul): why".to_owned();
    assert_eq!(actions, [Action::Abort(0, reason.clone()), Action::Abort(1, reason)]);
    assert_eq!(job.pass(300, &[]), []);
    assert_eq!(job.pass(100, &[]), [Action::Signal(0, TERM), Action::Signal(1, TERM)]);
    assert_eq!(job.pass(600, &[]), [Action::Kill(0), Action::Kill(1)]);
    assert_eq!(job.verdict(died(KILL)).exit_code, 3);
}

#[test]
fn what_a_rank_only_noticed_is_never_first() {
    let _limit = testkit::time_limit(10);
    let mut job = Job::attached(3);
    assert_eq!(job.event(failure(0, FailureKind::Error, 4, true)), [], "it waits for the other's own account");
    job.exit(0, Status::Code(4));
    job.now += Duration::from_millis(200);
    job.exit(2, died(KILL));
    job.event(failure(1, FailureKind::Error, 4, true));
    let verdict = job.verdict(Status::Code(4));
    assert_eq!(
        verdict.cause.map(|cause| cause.to_string()).as_deref(),
        Some("rank 2 was killed by SIGKILL before the first step (starting)")
    );
}

#[test]
fn a_failure_that_only_points_ends_the_job_too() {
    let _limit = testkit::time_limit(10);
    let mut job = Job::attached(2);
    assert_eq!(job.event(failure(0, FailureKind::Error, 4, true)), []);
    assert_eq!(job.pass(200, &[]), []);
    assert!(matches!(job.pass(100, &[])[..], [Action::Abort(0, _), Action::Abort(1, _)]));
    let verdict = job.verdict(Status::Code(4));
    assert_eq!((verdict.exit_code, verdict.cause.map(|cause| cause.rank)), (4, Some(0)));
}

#[test]
fn a_crash_goes_before_the_exit_codes_that_it_causes() {
    let _limit = testkit::time_limit(10);
    // A core file takes time: the peers' exits are seen first.
    let mut job = Job::new(2);
    job.exit(0, Status::Code(1));
    job.now += Duration::from_millis(400);
    job.exit(1, Status::Signal { number: 11, core: true });
    let cause = job.verdict(Status::Code(0)).cause.unwrap();
    assert_eq!(cause.to_string(), "rank 1 was killed by SIGSEGV (core dumped)");

    // A crash while ending is a consequence.
    let mut job = Job::new(2);
    job.exit(0, Status::Code(1));
    job.now += Duration::from_millis(900);
    job.exit(1, died(11));
    assert_eq!(job.verdict(Status::Code(0)).cause.unwrap().to_string(), "rank 0 exited with code 1");
}

#[test]
fn how_a_rank_ends_when_told_to_is_no_cause() {
    let _limit = testkit::time_limit(10);
    let mut job = Job::new(3);
    job.exit(2, died(KILL));
    job.exit(0, Status::Code(143));
    job.exit(1, died(TERM));
    let verdict = job.verdict(Status::Code(0));
    assert_eq!(verdict.cause.unwrap().to_string(), "rank 2 was killed by SIGKILL");
    // But a SIGTERM that somebody else sent is.
    let mut job = Job::new(2);
    job.exit(0, died(TERM));
    assert_eq!(job.verdict(died(TERM)).cause.unwrap().to_string(), "rank 0 was killed by SIGTERM");
}

#[test]
fn exit_codes_mean_the_same_only_for_programs_of_the_protocol() {
    let _limit = testkit::time_limit(10);
    for code in [1, 2, 3, 5, 6, 7, 8, 101, 255] {
        let mut job = Job::new(1);
        job.exit(0, Status::Code(code));
        assert_eq!(job.verdict(Status::Code(0)).exit_code, 4);
        let mut job = Job::attached(1);
        job.exit(0, Status::Code(code));
        let expected = if matches!(code, 2 | 3 | 5 | 6 | 7) { code as u8 } else { 4 };
        assert_eq!(job.verdict(Status::Code(0)).exit_code, expected, "code {code}");
    }
}

#[test]
fn a_panic_and_the_death_after_it_are_one_cause() {
    let _limit = testkit::time_limit(10);
    let mut job = Job::attached(1);
    job.event(failure(0, FailureKind::Panic, 4, false));
    job.event(failure(0, FailureKind::Error, 2, false));
    job.exit(0, Status::Code(4));
    let verdict = job.verdict(Status::Code(0));
    assert_eq!(verdict.exit_code, 4);
    assert_eq!(verdict.cause.unwrap().to_string(), "rank 0 panicked in step 7, instruction 3 (matmul): why");
}

#[test]
fn a_checkpoint_is_waited_for_as_long_as_it_gets_on() {
    let _limit = testkit::time_limit(10);
    let saving = Position { phase: Phase::Saving, step: 9, ..Position::default() };
    let mut job = Job::attached(2);
    job.event(at(0, saving.clone(), 1));
    job.event(failure(1, FailureKind::Error, 4, false));
    for progress in 2..20 {
        job.event(at(0, saving.clone(), progress));
        let actions = job.pass(30_000, &[Event::Beat(0), Event::Beat(1)]);
        assert!(!actions.contains(&Action::Kill(0)) && !actions.contains(&Action::Signal(0, TERM)), "{actions:?}");
    }
    let actions = job.pass(61_000, &[Event::Beat(0)]);
    assert!(actions.contains(&Action::Kill(0)), "a checkpoint that stands still is given up: {actions:?}");
}

#[test]
fn an_interrupt_asks_first_and_takes_the_grace_time() {
    let _limit = testkit::time_limit(10);
    let mut job = Job::new(2);
    job.event(Event::Attached(0));
    let actions = job.event(Event::Interrupt(Interrupt::Int));
    assert_eq!(actions, [Action::Stop(0), Action::Signal(1, 2)]);
    assert_eq!(job.event(Event::Attached(1)), [Action::Stop(1)], "a rank that joins late hears of it");
    let actions = job.pass(28_900, &[]);
    assert_eq!(actions, []);
    let actions = job.pass(100, &[]);
    assert!(actions.contains(&Action::Signal(0, TERM)) && actions.contains(&Action::Signal(1, TERM)), "{actions:?}");
    assert_eq!(job.pass(1000, &[]), [Action::Kill(0), Action::Kill(1)]);
    let verdict = job.verdict(died(KILL));
    assert_eq!((verdict.exit_code, verdict.cause, verdict.killed), (130, None, vec![0, 1]));
}

#[test]
fn a_second_interrupt_kills_at_once() {
    let _limit = testkit::time_limit(10);
    let mut job = Job::attached(2);
    job.event(Event::Interrupt(Interrupt::Term));
    job.exit(1, Status::Code(0));
    assert_eq!(job.event(Event::Interrupt(Interrupt::Term)), [Action::Kill(0)]);
    assert_eq!(job.verdict(died(KILL)).exit_code, 143);
    // Also while a failed job ends; its exit code stays.
    let mut job = Job::new(2);
    job.exit(0, Status::Code(1));
    assert_eq!(job.event(Event::Interrupt(Interrupt::Int)), [Action::Kill(1)]);
    assert_eq!(job.verdict(died(KILL)).exit_code, 4);
}

#[test]
fn a_checkpoint_that_fails_after_an_interrupt_is_told() {
    let _limit = testkit::time_limit(10);
    let mut job = Job::attached(2);
    job.event(Event::Interrupt(Interrupt::Term));
    let actions = job.event(failure(0, FailureKind::Error, 5, false));
    assert!(matches!(actions[..], [Action::Abort(0, _), Action::Abort(1, _)]), "{actions:?}");
    let verdict = job.verdict(Status::Code(5));
    assert_eq!((verdict.exit_code, verdict.cause.map(|cause| cause.exit_code)), (143, Some(5)));
}

/// A job of three in step 7; rank 1 in a matmul, the others waiting for it.
fn held_up() -> (Job, Vec<Event>) {
    let mut job = Job::attached(3);
    for (rank, waiting) in [(0, true), (1, false), (2, true)] {
        job.event(at(rank, in_step(7, 3, waiting), 50));
    }
    let beats = (0..3).map(Event::Beat).collect();
    (job, beats)
}

#[test]
fn the_rank_that_does_not_wait_holds_the_others_up() {
    let _limit = testkit::time_limit(10);
    let (mut job, beats) = held_up();
    assert_eq!(job.pass(59_900, &beats), []);
    let actions = job.pass(100, &beats);
    assert!(
        matches!(&actions[..], [Action::Abort(0, why), ..] if why.starts_with("rank 1 has not moved for 60 s in step 7")),
        "{actions:?}"
    );
    let verdict = job.verdict(died(KILL));
    assert_eq!((verdict.exit_code, verdict.cause.unwrap().rank), (6, 1));
}

#[test]
fn a_rank_that_does_not_end_after_its_work_hangs() {
    let _limit = testkit::time_limit(10);
    let mut job = Job::attached(2);
    job.exit(0, Status::Code(0));
    job.event(at(1, Position { phase: Phase::Done, step: 9, ..Position::default() }, 1));
    assert_eq!(job.pass(290_000, &[]).len(), 0, "silence is no fault of a process that is ending");
    assert!(!job.pass(11_000, &[]).is_empty());
    let verdict = job.verdict(died(KILL));
    assert_eq!(verdict.cause.unwrap().to_string(), "rank 1 has not moved for 300 s after its last step");
}

#[test]
fn a_rank_that_gets_on_excuses_those_who_wait() {
    let _limit = testkit::time_limit(10);
    let (mut job, beats) = held_up();
    for progress in 51..80 {
        job.event(at(1, in_step(7, 3, false), progress));
        assert_eq!(job.pass(30_000, &beats), []);
    }
}

#[test]
fn a_silent_process_hangs_even_before_its_first_step() {
    let _limit = testkit::time_limit(10);
    let mut job = Job::attached(2);
    let actions = job.pass(61_000, &[Event::Beat(0)]);
    assert!(matches!(&actions[..], [Action::Abort(..), ..]), "{actions:?}");
    assert_eq!(job.verdict(died(KILL)).cause.unwrap().rank, 1);
    // One that lives may take its time to start.
    let mut job = Job::attached(2);
    let beats = [Event::Beat(0), Event::Beat(1)];
    assert_eq!(job.pass(290_000, &beats), []);
    assert!(!job.pass(11_000, &beats).is_empty());
}

#[test]
fn a_stopped_process_is_named_before_its_victims() {
    let _limit = testkit::time_limit(10);
    let (mut job, _) = held_up();
    job.pass(1000, &[]);
    job.event(Event::Stopped(2, true));
    let actions = job.pass(60_000, &[Event::Beat(0), Event::Beat(1)]);
    assert!(
        matches!(&actions[..], [Action::Abort(0, why), ..] if why.contains("rank 2 has been stopped (SIGSTOP)")),
        "{actions:?}"
    );
    // A program outside the protocol shows nothing else; and one that goes on is forgiven.
    let mut job = Job::new(2);
    job.event(Event::Stopped(1, true));
    assert_eq!(job.pass(50_000, &[]), []);
    job.event(Event::Stopped(1, false));
    job.event(Event::Stopped(1, true));
    assert_eq!(job.pass(50_000, &[]), []);
    assert!(!job.pass(10_000, &[]).is_empty());
    assert_eq!(job.verdict(died(KILL)).exit_code, 6);
}

#[test]
fn when_all_wait_the_furthest_behind_is_named() {
    let _limit = testkit::time_limit(10);
    let mut job = Job::attached(3);
    for (rank, step, instruction) in [(0, 8, 1), (1, 7, 9), (2, 8, 0)] {
        job.event(at(rank, in_step(step, instruction, true), 50));
    }
    let beats: Vec<Event> = (0..3).map(Event::Beat).collect();
    job.pass(60_000, &beats);
    assert_eq!(job.verdict(died(KILL)).cause.unwrap().rank, 1);
    // Or the one that has not even joined.
    let mut job = Job::new(3);
    for rank in [0, 2] {
        job.event(Event::Attached(rank));
        job.event(at(rank, in_step(1, 0, true), 50));
    }
    job.pass(60_000, &[Event::Beat(0), Event::Beat(2)]);
    assert_eq!(job.verdict(died(KILL)).cause.unwrap().rank, 1);
}

#[test]
fn a_wait_that_ran_out_accuses_the_right_rank() {
    let _limit = testkit::time_limit(10);
    let (mut job, beats) = held_up();
    job.pass(20_000, &beats);
    job.event(failure(0, FailureKind::Timeout, 6, false));
    let verdict = job.verdict(Status::Code(6));
    assert_eq!((verdict.exit_code, verdict.cause.unwrap().rank), (6, 1));
}

#[test]
fn time_in_which_the_launcher_did_not_run_does_not_count() {
    let _limit = testkit::time_limit(10);
    let (mut job, beats) = held_up();
    job.pass(1000, &beats);
    job.now += Duration::from_secs(3600);
    assert_eq!(job.event(Event::Tick), []);
    assert_eq!(job.pass(58_000, &beats), []);
    assert!(!job.pass(2000, &beats).is_empty());
}

#[test]
fn hang_detection_can_be_turned_off() {
    let _limit = testkit::time_limit(10);
    let mut job = Job::with(Options { world: 1, grace: None, hang_timeout: None, max_restarts: 0 });
    job.event(Event::Attached(0));
    job.event(Event::Stopped(0, true));
    assert_eq!(job.pass(1_000_000, &[]), []);
}

#[test]
fn only_crashes_and_hangs_are_started_again() {
    let _limit = testkit::time_limit(10);
    let options = Options { world: 1, grace: None, hang_timeout: None, max_restarts: 1 };
    let mut job = Job::with(options);
    job.exit(0, Status::Code(1));
    assert!(matches!(job.end(Status::Code(0)), Action::Restart(_)));
    job.state.restart(job.now);
    assert_eq!(job.state.attempt(), 1);
    job.exit(0, Status::Code(1));
    assert!(matches!(job.end(Status::Code(0)), Action::Done(Verdict { exit_code: 4, .. })), "once was allowed");
    for code in [2, 3, 5, 7] {
        let mut job = Job::with(options);
        job.event(Event::Attached(0));
        job.event(failure(0, FailureKind::Error, code, false));
        assert!(matches!(job.end(Status::Code(4)), Action::Done(_)), "code {code}");
    }
    let mut job = Job::with(options);
    job.event(Event::Interrupt(Interrupt::Int));
    job.exit(0, died(11));
    assert!(matches!(job.end(Status::Code(0)), Action::Done(Verdict { exit_code: 130, .. })));
}

/// Whatever happens in whatever order: a job ends once, after its last rank; a failed one has no rank left unkilled after
/// the grace time; and a signal is sent once.
#[test]
fn any_order_of_events_ends_well() {
    let _limit = testkit::time_limit(60);
    let mut random = 12345u64;
    let mut below = move |limit: u64| {
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (random >> 33) % limit
    };
    for _ in 0..2000 {
        let world = 1 + below(4) as u32;
        let mut job = Job::with(Options {
            world,
            grace: [None, Some(Duration::ZERO), Some(Duration::from_secs(3))][below(3) as usize],
            hang_timeout: [None, Some(Duration::from_secs(5))][below(2) as usize],
            max_restarts: below(2) as u32,
        });
        let mut sent: Vec<Action> = Vec::new();
        let mut over = 0;
        for _ in 0..60 {
            let rank = below(u64::from(world)) as u32;
            let alive = job.state.ranks[rank as usize].exit.is_none();
            let gone = job.state.ranks[rank as usize].gone;
            let event = match below(10) {
                0 if alive => Event::Attached(rank),
                1 if alive => failure(rank, FailureKind::Error, 4, below(2) == 0),
                2 if alive => failure(rank, FailureKind::Timeout, 6, false),
                3 if alive => Event::Exited(rank, Status::Code(below(3) as i32)),
                4 if alive => Event::Exited(rank, died(KILL)),
                5 if !alive && !gone => Event::Gone(rank),
                6 => Event::Stopped(rank, below(2) == 0),
                7 if below(10) == 0 => Event::Interrupt(Interrupt::Int),
                8 if alive => at(rank, in_step(below(9), below(9) as u32, below(2) == 0), below(99)),
                _ => Event::Tick,
            };
            job.now += Duration::from_millis(below(1500));
            let actions = job.event(event);
            for action in actions {
                match action {
                    Action::Done(_) | Action::Restart(_) => over += 1,
                    Action::Signal(..) | Action::Kill(_) => {
                        assert!(!sent.contains(&action), "{action:?} twice");
                        sent.push(action);
                    }
                    _ => {}
                }
            }
            let ended = |r: &RankState| r.gone || r.is_stuck(job.now);
            assert_eq!(over > 0, job.state.ranks.iter().all(ended));
            if over > 0 {
                break;
            }
        }
        assert!(over <= 1);
        if over == 0 && matches!(job.state.course, Course::Ending(_)) {
            job.pass(5000, &[]);
            assert!(job.state.ranks.iter().all(|r| r.exit.is_some() || r.sent.contains(&KILL)));
        }
    }
}
