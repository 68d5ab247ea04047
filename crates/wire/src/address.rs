//! Where a store listens, and a blocking stream to it.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::str::FromStr;
use std::time::Duration;

/// Where a store listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A Unix socket without a file (Linux's abstract namespace): nothing to clean up, nothing to clash with.
    Abstract(String),
    /// Host and port.
    Tcp(String),
}

/// Text that is no address.
#[derive(Debug, thiserror::Error)]
#[error("{0:?} is no address of a store; use unix:@NAME or tcp:HOST:PORT")]
pub struct AddressError(String);

impl FromStr for Address {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let wrong = || AddressError(text.to_owned());
        if let Some(name) = text.strip_prefix("unix:@") {
            return if name.is_empty() { Err(wrong()) } else { Ok(Self::Abstract(name.to_owned())) };
        }
        let host_port = text.strip_prefix("tcp:").ok_or_else(wrong)?;
        let (host, port) = host_port.rsplit_once(':').ok_or_else(wrong)?;
        if host.is_empty() || port.parse::<u16>().is_err() {
            return Err(wrong());
        }
        Ok(Self::Tcp(host_port.to_owned()))
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Abstract(name) => write!(f, "unix:@{name}"),
            Self::Tcp(host_port) => write!(f, "tcp:{host_port}"),
        }
    }
}

impl Address {
    /// Connects, waiting for an answer at most `timeout` per address that the name stands for.
    ///
    /// # Errors
    /// When nobody listens there, or the name is unknown.
    pub fn connect(&self, timeout: Duration) -> io::Result<Stream> {
        match self {
            Self::Abstract(name) => UnixStream::connect_addr(&SocketAddr::from_abstract_name(name)?).map(Stream::Unix),
            Self::Tcp(host_port) => {
                let mut last = io::Error::new(io::ErrorKind::NotFound, "the name stands for no address");
                for address in host_port.to_socket_addrs()? {
                    match TcpStream::connect_timeout(&address, timeout) {
                        Ok(stream) => {
                            stream.set_nodelay(true)?;
                            return Ok(Stream::Tcp(stream));
                        }
                        Err(error) => last = error,
                    }
                }
                Err(last)
            }
        }
    }
}

/// A blocking connection to a store.
#[derive(Debug)]
pub enum Stream {
    /// Over a Unix socket.
    Unix(UnixStream),
    /// Over TCP.
    Tcp(TcpStream),
}

impl Stream {
    /// A second handle of the same connection.
    ///
    /// # Errors
    /// When the process has no file descriptor left.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(match self {
            Self::Unix(stream) => Self::Unix(stream.try_clone()?),
            Self::Tcp(stream) => Self::Tcp(stream.try_clone()?),
        })
    }

    /// Ends the connection for all its handles. A connection that has ended already is fine.
    pub fn shutdown(&self) {
        let both = std::net::Shutdown::Both;
        // The only failure is "not connected", which is what was asked for.
        let _already_closed = match self {
            Self::Unix(stream) => stream.shutdown(both),
            Self::Tcp(stream) => stream.shutdown(both),
        };
    }

    /// Longest wait of a read; `None` for no limit.
    ///
    /// # Errors
    /// When the system refuses it.
    pub fn set_read_timeout(&self, limit: Option<Duration>) -> io::Result<()> {
        match self {
            Self::Unix(stream) => stream.set_read_timeout(limit),
            Self::Tcp(stream) => stream.set_read_timeout(limit),
        }
    }
}

impl Read for Stream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Unix(stream) => stream.read(buffer),
            Self::Tcp(stream) => stream.read(buffer),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        match self {
            Self::Unix(stream) => stream.write(buffer),
            Self::Tcp(stream) => stream.write(buffer),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Unix(stream) => stream.flush(),
            Self::Tcp(stream) => stream.flush(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_and_back() {
        let _limit = testkit::time_limit(10);
        for text in ["unix:@gpurun-1", "tcp:127.0.0.1:80", "tcp:[::1]:80", "tcp:host:1"] {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
        }
        for text in ["", "unix:@", "tcp:host", "tcp::80", "tcp:host:http", "host:80"] {
            assert!(text.parse::<Address>().is_err(), "{text}");
        }
    }
}
