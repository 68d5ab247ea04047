//! The `gpurun` executable: starts one worker a rank, brings them together, watches over them, and says what happened.
//!
//! Nothing of CUDA is touched here, so the launcher stays small and cannot be taken down by a driver.
#![forbid(unsafe_code)]

mod builtin;
mod cli;
mod display;
mod environment;
mod machine;
mod output;
mod rank;
mod report;
mod run;
mod server;
mod shim;
mod supervise;

use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().collect();
    if let Some(code) = shim::enter(&arguments) {
        return code;
    }
    let code = match cli::parse(arguments) {
        Ok(cli::Request::Launch(job)) => run::run(&job),
        Ok(cli::Request::Here(builtin, call)) => (builtin.run)(&call),
        Ok(cli::Request::Print(text)) => {
            // A reader that closed the pipe has read enough of the help.
            let _closed = std::io::Write::write_all(&mut std::io::stdout(), text.as_bytes());
            0
        }
        Err(error) => {
            eprintln!("gpurun: {error:#}");
            2
        }
    };
    ExitCode::from(code)
}
