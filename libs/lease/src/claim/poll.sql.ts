/** Promotes what is due and lists the lanes that hold something for this worker; see `poll_v1`. Locks the rows it promotes. */
export const pollSql = (s: string): string =>
  `SELECT promoted, lanes, suspects, next_due_ms, look_us FROM ${s}.poll_v1($1::text[], $2::text[], $3, $4)`;
