/** The result as JSON text, or why it cannot be one. */
export type EncodedResult = { json: string | null } | { problem: string };

const ESCAPED_NUL_OR_SURROGATE = /((?:^|[^\\])(?:\\\\)*)\\u(?:0000|d[89a-f][0-9a-f]{2})/gi;

/**
 * Encodes what a handler returned. NUL and lone surrogates become U+FFFD, since the database stores neither. A BigInt, a cycle or a
 * result over `maxBytes` is a problem: the run is then failed for good with this text, because running it again would repeat its
 * effects to the same end.
 */
export function encodeResult(
  result: unknown,
  maxBytes: number,
  what: 'result' | 'checkpoint' = 'result',
): EncodedResult {
  let json: string | undefined;
  try {
    json = JSON.stringify(result);
  } catch (error) {
    return {
      problem: `the ${what} cannot be stored as JSON: ${error instanceof Error ? error.message : String(error)}`,
    };
  }
  if (json === undefined) return { json: null };
  const bytes = Buffer.byteLength(json);
  if (bytes > maxBytes)
    return { problem: `the ${what} has ${bytes} bytes of JSON, more than ${what}MaxBytes = ${maxBytes}` };
  return {
    json: json.includes('\\u')
      ? json.replace(ESCAPED_NUL_OR_SURROGATE, '$1\\ufffd').replace(ESCAPED_NUL_OR_SURROGATE, '$1\\ufffd')
      : json,
  };
}

/** Whether JSON text holds an escaped NUL or lone surrogate, which PostgreSQL refuses to read as text. */
export const holdsUnstorable = (json: string): boolean => {
  if (!json.includes('\\u')) return false;
  ESCAPED_NUL_OR_SURROGATE.lastIndex = 0;
  return ESCAPED_NUL_OR_SURROGATE.test(json);
};
